"""dfkv: a distributed KV cache for LLM inference. Importing this has no side effects and loads no native code."""

__version__ = "0.1.0"

"""Makes small models with random weights on disk: no download, the same bytes for the same parameters.

Imported, this module needs the standard library alone; what needs torch runs as a script under an engine's interpreter:

    tiny_model.py model   OUT SPEC_JSON      a Llama and a tokenizer with one token per byte
    tiny_model.py lora    OUT SPEC_JSON      a PEFT LoRA adapter for such a model
    tiny_model.py weights MODEL SEED         changes one matrix of a model in place; names, sizes and times stay
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__:
    from .setup_engine import cache_root

MAKE_DEADLINE_S = 300.0
BYTE_TOKENS = 256
BOS, EOS, PAD = 256, 257, 258


@dataclass(frozen=True)
class ModelSpec:
    """The parameters of a random Llama. Equal specs give equal bytes on disk."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    max_positions: int
    dtype: str = "bfloat16"
    vocabulary: int = 1024
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        item = {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * item

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


TINY = ModelSpec(hidden=256, layers=4, heads=8, kv_heads=4, intermediate=512, max_positions=8192)
"""2.7 M parameters: for behaviour."""

WIDE = ModelSpec(hidden=256, layers=8, heads=8, kv_heads=8, intermediate=512, max_positions=8192)
"""4 times the KV of TINY: for transfers that last."""

SMALL = ModelSpec(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=3072, max_positions=16384)
"""105 M parameters, 12,288 bytes of KV a token: prefilling 8k tokens takes 10 to 30 s on two cores."""


@dataclass(frozen=True)
class LoraSpec:
    """The parameters of a random LoRA adapter for a model of spec `model`."""

    model: ModelSpec
    rank: int = 8
    scale: float = 1.0
    seed: int = 0


def ensure_model(python: Path, spec: ModelSpec) -> Path:
    """The directory of the model of `spec`, made first where it is missing. `python`: an engine's interpreter."""
    name = f"llama-{spec.hidden}-{spec.layers}-{spec.heads}-{spec.kv_heads}-{spec.dtype}"
    return _ensure(python, "model", name, json.dumps(asdict(spec), sort_keys=True))


def ensure_lora(python: Path, spec: LoraSpec) -> Path:
    """The directory of the adapter of `spec`, made first where it is missing."""
    return _ensure(python, "lora", f"lora-{spec.rank}", json.dumps(asdict(spec), sort_keys=True))


def change_weights(python: Path, model: Path, seed: int) -> None:
    """Changes one matrix of the model at `model`, in place. Directory, names, sizes and times stay as they were: only the
    content tells that it is another model. Not for a directory that `ensure_model` gave: copy that first."""
    if model.is_relative_to(cache_root()):
        raise ValueError(f"{model} is shared: change the weights of a copy")
    _run(python, "weights", str(model), str(seed))


def _ensure(python: Path, kind: str, name: str, spec: str) -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes() + spec.encode()).hexdigest()[:12]
    path = cache_root() / "models" / f"{name}-{digest}"
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        _run(python, kind, str(temporary), spec)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():  # otherwise another process made the same bytes meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _run(python: Path, *arguments: str) -> None:
    command = [str(python), str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:3])} ended with {done.returncode}:\n{done.stderr[-3000:]}")


# ---- below: under the engine's interpreter -----------------------------------------------------------------------------


def _write_model(out: Path, spec: ModelSpec) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)
    # Attention scores with a standard deviation near 5, whatever the width: each answer depends on a few far tokens, so that
    # wrong KV bytes give another answer. Logits near 1, where bfloat16 tells the best
    # token from the second.
    inner = math.sqrt(4.8 / spec.hidden)
    head = spec.hidden // spec.heads

    def matrix(rows: int, columns: int, deviation: float = inner) -> Any:
        return (torch.randn(rows, columns) * deviation).to(dtype)

    tensors = {
        "model.embed_tokens.weight": matrix(spec.vocabulary, spec.hidden),
        "model.norm.weight": torch.ones(spec.hidden, dtype=dtype),
        "lm_head.weight": matrix(spec.vocabulary, spec.hidden, 0.5 / math.sqrt(spec.hidden)),
    }
    for index in range(spec.layers):
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "self_attn.q_proj.weight": matrix(spec.hidden, spec.hidden),
            layer + "self_attn.k_proj.weight": matrix(spec.kv_heads * head, spec.hidden),
            layer + "self_attn.v_proj.weight": matrix(spec.kv_heads * head, spec.hidden),
            layer + "self_attn.o_proj.weight": matrix(spec.hidden, spec.hidden),
            layer + "mlp.gate_proj.weight": matrix(spec.intermediate, spec.hidden),
            layer + "mlp.up_proj.weight": matrix(spec.intermediate, spec.hidden),
            layer + "mlp.down_proj.weight": matrix(spec.hidden, spec.intermediate),
            layer + "input_layernorm.weight": torch.ones(spec.hidden, dtype=dtype),
            layer + "post_attention_layernorm.weight": torch.ones(spec.hidden, dtype=dtype),
        }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": spec.dtype,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    _write_tokenizer(out, spec)


def _write_tokenizer(out: Path, spec: ModelSpec) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    vocabulary |= {f"<extra_{index}>": index for index in range(len(vocabulary), spec.vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<pad>")])
    tokenizer.save(str(out / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{m['role']}}]: {{m['content']}}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]: {% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_positions,
        "chat_template": template,
    }
    _write_json(out / "tokenizer_config.json", config)


def _write_lora(out: Path, spec: LoraSpec) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(spec.seed)
    model = spec.model
    dtype = getattr(torch, model.dtype)
    head = model.hidden // model.heads
    rows = {"q_proj": model.hidden, "k_proj": model.kv_heads * head, "v_proj": model.kv_heads * head}
    tensors = {}
    for index in range(model.layers):
        for name, height in rows.items():
            base = f"base_model.model.model.layers.{index}.self_attn.{name}."
            down = torch.randn(spec.rank, model.hidden) / math.sqrt(model.hidden)
            up = torch.randn(height, spec.rank) * (spec.scale / math.sqrt(spec.rank))
            tensors[base + "lora_A.weight"] = down.to(dtype)
            tensors[base + "lora_B.weight"] = up.to(dtype)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": spec.rank,
        "lora_alpha": spec.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": sorted(rows),
    }
    _write_json(out / "adapter_config.json", config)


def _change_weights(model: Path, seed: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    before = path.stat()
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    matrix = tensors["model.layers.0.self_attn.v_proj.weight"]
    noise = torch.randn(matrix.shape, generator=generator) * matrix.float().std()
    tensors["model.layers.0.self_attn.v_proj.weight"] = (matrix.float() + noise).to(matrix.dtype)
    # Another file under the same name: an engine that runs on the old one may have it mapped.
    changed = path.with_suffix(".changed")
    save_file(tensors, changed, metadata={"format": "pt"})
    if changed.stat().st_size != before.st_size:
        raise RuntimeError(f"{path} would change its size from {before.st_size} to {changed.stat().st_size} bytes")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed.replace(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str]) -> int:
    kind, path = arguments[0], Path(arguments[1])
    if kind == "model":
        _write_model(path, ModelSpec(**json.loads(arguments[2])))
    elif kind == "lora":
        fields = json.loads(arguments[2])
        _write_lora(path, LoraSpec(**(fields | {"model": ModelSpec(**fields["model"])})))
    elif kind == "weights":
        _change_weights(path, int(arguments[2]))
    else:
        raise ValueError(f"unknown kind {kind!r}: expected model, lora or weights")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

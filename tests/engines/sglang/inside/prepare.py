"""Makes SGLang's test fixtures importable on a CPU. Import it before them."""

import importlib.machinery
import sys
import types
import warnings
from pathlib import Path

import torch
import transformers  # noqa: F401

warnings.filterwarnings("ignore")
sys.path.append(str(Path(__file__).resolve().parents[2]))  # what the tests of all engines share

# The fixtures' module imports benchmarks, and those a package that nothing here uses.
_datasets = types.ModuleType("datasets")
_datasets.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
_datasets.load_dataset = None  # type: ignore[attr-defined]
sys.modules.setdefault("datasets", _datasets)

import dfkv_sgl_cpu_shim  # noqa: E402

dfkv_sgl_cpu_shim.activate()

if not hasattr(torch.cpu.Stream, "synchronize"):
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]

"""A plugin of SGLang for tests on a CPU: gives the host pools the copies that they import under an accelerator only,
and host memory that is not pinned. It patches private modules, so it belongs to one version."""

import importlib
import os

_HOST_POOLS = ("mha", "mla", "mamba", "dsa", "unified")
_PINNING = {  # classes whose constructors ask for pinned memory
    "pool_host.base": ("HostKVCache",),
    "pool_host.dsa": ("DSAIndexerPoolHost",),
    "memory_pool_host": ("DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool"),
}


def activate():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    kvcacheio = importlib.import_module("sgl_kernel.kvcacheio")
    copies = {name: getattr(kvcacheio, name) for name in dir(kvcacheio) if name.startswith("transfer_")}
    modules = [f"sglang.srt.mem_cache.pool_host.{name}" for name in _HOST_POOLS]
    for module in map(importlib.import_module, [*modules, "sglang.srt.mem_cache.memory_pool_host"]):
        for name, copy in copies.items():
            if not hasattr(module, name):
                setattr(module, name, copy)
    common = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_, **__: None
    for module, pools in _PINNING.items():
        for pool in pools:
            _never_pin(getattr(importlib.import_module(f"sglang.srt.mem_cache.{module}"), pool))


def _never_pin(pool):
    make = pool.__init__

    def init(self, *arguments, **options):
        make(self, *arguments, **options | {"pin_memory": False})

    pool.__init__ = init

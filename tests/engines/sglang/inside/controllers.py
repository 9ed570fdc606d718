"""Runs inside SGLang's environment: HiCacheController and its host pools, from one controller through dfkv to a second.

usage: controllers.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS is that of a dfkv node)
"""

import itertools
import os
import random
import threading
import time
import unittest

import prepare  # noqa: F401  (first)
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE = 4
PAGES = 9
SLOTS = 64
BACKEND = {"backend_name": "dfkv", "module_path": "dfkv_connectors.sglang", "class_name": "DfkvHiCache"}
LAYOUTS = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)


def make_pool(kind):
    shared = {"size": SLOTS, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": 3, "device": "cpu"}
    if kind == "mla":
        return MLATokenToKVPool(**shared, kv_lora_rank=32, qk_rope_head_dim=16, enable_memory_saver=False)
    heads = 2 if kind == "mha-half" else 4
    return MHATokenToKVPool(**shared, head_num=heads, head_dim=16, enable_memory_saver=False)


def make_host_pool(device_pool, layout, io):
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend=io,
        hicache_mem_layout=layout,
        hicache_ratio=2.0,
        hicache_storage_backend="file",
    )
    set_global_server_args_for_scheduler(arguments)
    host = build_kv_host_pool(kv_pool=device_pool, page_size=PAGE)
    assert host.layout == layout, host.layout
    return host


def page_bytes(host, slots):
    return [host.get_data_page(slot).contiguous().reshape(-1).view(torch.uint8).clone() for slot in slots]


class Controllers(unittest.TestCase):
    def setUp(self):
        override = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)

    def controller(self, kind, layout, io, interface, **extra):
        device_pool = make_pool(kind)
        host = make_host_pool(device_pool, layout, io)
        allocator = TokenToKVPoolAllocator(SLOTS, torch.bfloat16, "cpu", device_pool, False)
        config = {
            **BACKEND,
            "addresses": [os.environ["DFKV_TEST_ADDRESS"]],
            "weights_id": "controllers",
            "lookup_deadline_ms": 3000,
            **({"interface_v1": 1} if interface == "v1" else {}),
            **extra,
        }
        made = HiCacheController(
            allocator,
            host,
            PAGE,
            tp_group=None,
            load_cache_event=threading.Event(),
            write_policy="write_through",
            io_backend=io,
            storage_backend="dynamic",
            prefetch_threshold=1,
            model_name="model",
            storage_backend_extra_config=config,
        )
        self.addCleanup(made.storage_backend.close)
        self.addCleanup(made._stop_storage_threads)
        return made

    def store(self, controller, tokens):
        """Backs up random pages. Returns their bytes."""
        host = controller.mem_pool_host
        slots = host.alloc(len(tokens))
        for buffer in [host.kv_buffer] if isinstance(host.kv_buffer, torch.Tensor) else host.kv_buffer:
            flat = buffer.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
        controller.write_storage(slots, tokens, hash_value=get_hash_str(tokens, page_size=PAGE))
        operation = controller.ack_backup_queue.get(timeout=20)
        self.assertEqual(operation.completed_tokens, len(tokens))
        return page_bytes(host, slots[::PAGE].tolist())

    def restore(self, controller, tokens):
        """Prefetches into pages of other slots. Returns their bytes."""
        host = controller.mem_pool_host
        host.alloc(PAGE * random.randint(1, 4))
        operation = controller.prefetch("request", tokens)
        operation = controller.prefetch_hit_queue.get(timeout=20)
        hit = operation.storage_hit_count
        operation.host_indices = host.alloc(hit) if hit else torch.empty(0, dtype=torch.int64)
        controller.prefetch_buffer.put(operation)
        completed, until = 0, time.monotonic() + 20
        while time.monotonic() < until:
            ack = controller.ack_prefetch_queue.get(timeout=20)
            completed = ack.completed_tokens if ack.completed_tokens is not None else completed
            if ack.completed_req:
                break
        self.assertEqual(completed, hit)
        return page_bytes(host, operation.host_indices[::PAGE].tolist())

    def round_trip(self, kind, layout, io, interface):
        tokens = [random.randrange(1 << 20) for _ in range(PAGES * PAGE)]
        writer = self.controller(kind, layout, io, interface)
        stored = self.store(writer, tokens)
        reader = self.controller(kind, layout, io, interface)
        restored = self.restore(reader, tokens)
        self.assertEqual(len(restored), PAGES)
        for index, (found, wanted) in enumerate(zip(restored, stored, strict=True)):
            self.assertTrue(torch.equal(found, wanted), f"page {index}")
        for each in (writer, reader):
            self.assertEqual(each.storage_backend.counters.total("faults"), 0)
        # Another suffix on the same prefix finds the prefix alone.
        longer = tokens[: 5 * PAGE] + [random.randrange(1 << 20) for _ in range(3 * PAGE)]
        self.assertEqual(len(self.restore(reader, longer)), 5)

    def test_threads_may_change(self):
        """reset(), behind flush_cache, starts new threads."""
        tokens = [random.randrange(1 << 20) for _ in range(PAGES * PAGE)]
        writer = self.controller("mha", "page_first", "kernel", "v1")
        stored = self.store(writer, tokens)
        writer.reset()
        writer.mem_pool_host.clear()
        restored = self.restore(writer, tokens)
        self.assertTrue(all(map(torch.equal, restored, stored)))

    def test_interfaces_do_not_mix(self):
        """layer_first pages stand in another order in flat copies, at equal sizes."""
        tokens = [random.randrange(1 << 20) for _ in range(PAGES * PAGE)]
        self.store(self.controller("mha", "layer_first", "kernel", "v1"), tokens)
        self.assertEqual(self.restore(self.controller("mha", "layer_first", "kernel", "generic"), tokens), [])

    def test_layouts_do_not_mix(self):
        tokens = [random.randrange(1 << 20) for _ in range(PAGES * PAGE)]
        self.store(self.controller("mha", "page_first", "kernel", "v1"), tokens)
        for layout, io in (("page_head", "kernel"), ("page_first_direct", "direct")):
            self.assertEqual(self.restore(self.controller("mha", layout, io, "v1"), tokens), [])


def _define():
    for kind, (layout, io), interface in itertools.product(("mha", "mla"), LAYOUTS, ("generic", "v1")):
        if kind == "mla" and layout == "page_head":  # it has no heads
            continue

        def test(self, case=(kind, layout, io, interface)):
            self.round_trip(*case)

        setattr(Controllers, f"test_{kind}_{layout}_{io}_{interface}", test)


_define()

if __name__ == "__main__":
    unittest.main()

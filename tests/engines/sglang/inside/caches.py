"""Runs inside SGLang's environment: UnifiedRadixCache and its pools, from one cache through dfkv to a second, byte for byte.

usage: caches.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS is that of a dfkv node)

The fixtures are SGLang's own, of the wheel; only the storage backend is ours.
"""

import itertools
import json
import os
import random
import unittest
from array import array
from unittest import mock

import prepare  # noqa: F401  (first)
import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    drop_hicache_atexit_pin,
    match_prefix,
    node_host_value,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

_requests = itertools.count()
PAGE = 4


class CacheFixtures(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """A cache that stores, and a second one that restores."""

    def attach(self, cache, *, layout, io, interface, policy="wait_complete", **extra):
        """As _init_hicache of the fixtures, with dfkv as storage."""
        override = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)
        config = {
            "backend_name": "dfkv",
            "module_path": "dfkv_connectors.sglang",
            "class_name": "DfkvHiCache",
            "prefetch_threshold": 1,
            "addresses": [os.environ["DFKV_TEST_ADDRESS"]],
            "weights_id": "inside",
            "lookup_deadline_ms": 3000,
            **({"interface_v1": 1} if interface == "v1" else {}),
            **extra,
        }
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend=io,
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(config),
            hicache_storage_prefetch_policy=policy,
        )
        arguments._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        self.addCleanup(controller.storage_backend.close)
        self.addCleanup(controller._stop_storage_threads)

    def pages(self, cache, sequence):
        """The bytes of every host page on the path of a sequence, by pool, in order."""
        found = {}
        sources = {each.pool_name: each.indices_from_pool for each in cache.sidecar_pool_specs}
        kinds = {"kv": ComponentType.FULL, "swa": ComponentType.SWA, "mamba": ComponentType.MAMBA}
        node = match_prefix(cache, sequence).last_host_node
        for each in self._path_chain(cache, node):
            for entry in cache.cache_controller.mem_pool_host.entries:
                value = node_host_value(cache, each, kinds[sources.get(entry.name, entry.name)])
                if value is None:
                    continue
                pool = entry.host_pool
                for slot in value[:: pool.page_size].tolist():
                    page = pool.get_data_page(slot).contiguous().reshape(-1).view(torch.uint8)
                    found.setdefault(str(entry.name), []).append(page.clone())
        return found

    def fill(self, cache, seed):
        """Random bytes in every device pool, so that a page in another one's place shows."""
        generator = torch.Generator().manual_seed(seed)
        for entry in cache.cache_controller.mem_pool_host.entries:
            for tensor in device_tensors(entry):
                flat = tensor.view(torch.uint8)
                flat.copy_(torch.randint(0, 128, flat.shape, generator=generator, dtype=torch.uint8))

    def replace_pools(self, **makers):
        """Classes of pools by the name under which the fixtures know them."""
        for name, maker in makers.items():
            patch = mock.patch.object(fixtures, name, maker)
            patch.start()
            self.addCleanup(patch.stop)

    def produce(self, cfg, **options):
        """Returns a cache whose pages are stored, their tokens, and their bytes by pool."""
        self.cfg = cfg
        self.seed = random.randrange(1 << 30)
        producer, allocator, requests = build_fixture(cfg)
        self.attach(producer, **options)
        # Mamba and sliding windows restore at checkpoints: one insertion, one node chain.
        count = 6 if cfg.sliding_window_size is None else -(-cfg.sliding_window_size // cfg.page_size) + 3
        sequence = self._make_seq(random.randrange(1 << 20), count)
        self._insert(producer, allocator, requests, sequence)
        self.fill(producer, self.seed)
        leaf = match_prefix(producer, sequence).last_device_node
        self._backup_node(producer, leaf)
        self._write_path_to_l3(producer, leaf)
        self._flush_l3_backups(producer)
        return producer, sequence, self.pages(producer, sequence)

    def consume(self, sequence, **options):
        """Returns a fresh cache that looked for the tokens, and what bytes it has now, by pool."""
        consumer, _, _ = build_fixture(self.cfg)
        self.attach(consumer, **options)
        handle = CacheRequestHandle(f"r{next(_requests)}", 0)
        consumer.prefetch_from_storage(handle, consumer.root_node_handle(), array("q", sequence), None, None)
        if options.get("policy") == "best_effort":  # which ends a load that nobody has waited for
            operation = consumer.ongoing_prefetch[handle].operation
            self._pump_hicache_until(
                consumer,
                lambda: (
                    operation.completed_tokens == len(sequence)
                    and (not operation.pool_transfers or operation.pool_transfers_done)
                ),
                "no load",
            )
        self._run_prefetch_to_completion(consumer, handle)
        self.assertEqual(consumer.cache_controller.storage_backend.counters.total("faults"), 0)
        return consumer, self.pages(consumer, sequence)

    def round_trip(self, cfg, **options):
        _, sequence, stored = self.produce(cfg, **options)
        consumer, restored = self.consume(sequence, **options)
        count = len(sequence) // cfg.page_size
        self.assertEqual(len(restored.get("kv", ())), count)
        for name, found in restored.items():
            wanted = stored[name][-len(found) :]
            self.assertTrue(found)
            for index, (page, original) in enumerate(zip(found, wanted, strict=True)):
                self.assertTrue(torch.equal(page, original), f"page {index} of {name}, seed {self.seed}")
        self.assertEqual(set(restored), set(stored))
        self.assertGreaterEqual(consumer.cache_controller.storage_backend.counters.total("pages", "load"), count)


class Caches(CacheFixtures):
    """Each kind of cache, layout, interface and policy."""


def latent_pool(*, head_num, head_dim, **shared):
    """What the fixtures make of heads, as the one latent of MLA."""
    return MLATokenToKVPool(kv_lora_rank=head_num * head_dim, qk_rope_head_dim=16, **shared)


def device_tensors(entry):
    """Every tensor of a device pool. Host pools of packed bytes name those that they mirror."""
    for value in vars(entry.device_pool).values() if entry.device_pool is not None else ():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.dtype in (torch.bfloat16, torch.float32, torch.float16):
                yield each
    for name in ("device_buffers", "device_page_views", "packed_device_index_buffers"):
        yield from getattr(entry.host_pool, name, ())


FULL = CacheConfig(page_size=PAGE, components=(ComponentType.FULL,), num_layers=3)
SWA = CacheConfig(page_size=PAGE, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=8)
MAMBA = CacheConfig(
    page_size=PAGE,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
)
LAYOUTS = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)
MAMBA_LAYOUTS = tuple(
    each for each in LAYOUTS if each[0] in ("page_first", "page_first_direct")
)  # all that SGLang takes
LATENT_LAYOUTS = tuple(each for each in LAYOUTS if each[0] != "page_head")  # it has no heads
POLICIES = ("best_effort", "timeout", "wait_complete")


def _define():
    kinds = [
        ("full", FULL, LAYOUTS),
        ("mla", FULL, LATENT_LAYOUTS),
        ("swa", SWA, LAYOUTS),
        ("mamba", MAMBA, MAMBA_LAYOUTS),
    ]
    cases = [(name, cfg, *layout) for name, cfg, layouts in kinds for layout in layouts]
    for (name, cfg, layout, io), interface, policy in itertools.product(cases, ("generic", "v1"), POLICIES):
        options = {"layout": layout, "io": io, "interface": interface, "policy": policy}

        def test(self, cfg=cfg, latent=name == "mla", options=options):
            if latent:
                self.replace_pools(MHATokenToKVPool=latent_pool)
            self.round_trip(cfg, **options)

        setattr(Caches, f"test_{name}_{layout}_{io}_{interface}_{policy}", test)


_define()

if __name__ == "__main__":
    unittest.main()

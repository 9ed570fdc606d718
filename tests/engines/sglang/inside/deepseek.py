"""Runs inside SGLang's environment: the caches of DeepSeek's models, over SGLang's own device and host pools.

usage: deepseek.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS is that of a dfkv node)

V4: a logical pool as anchor, whose pages are those of the pools beside it (compressed KV, indexer, sliding window and the
states of the compressors). DSA: MLA with the keys of an indexer beside it.
"""

import itertools
import unittest

import prepare  # noqa: F401  (first)
import torch
from caches import CacheFixtures
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix

from dfkv_connectors.sglang.sharing import page_ids
from dfkv_core.keys import ALL_PARTS

V4 = CacheConfig(
    page_size=256,  # what 128 tokens of one layer are compressed into must not cross a page
    components=(ComponentType.FULL, ComponentType.SWA),
    sliding_window_size=128,
    kv_size=2048,
    max_context_len=2048,
)
DSA = CacheConfig(page_size=64, components=(ComponentType.FULL,), num_layers=3, kv_size=1024, max_context_len=1024)
LAYOUTS = (
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
)  # all that these pools take
POLICIES = ("best_effort", "timeout", "wait_complete")
V4_WHOLE = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")  # a page for each page of the prefix
V4_TRAILING = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")  # those of the window at its end


def v4_pool(*, size, size_swa, page_size, device, **_):
    """In place of the fixtures' SWAKVPool."""
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=size_swa,
        c4_size=size // 4,
        c128_size=size // 128,
        c4_state_pool_size=(size_swa // page_size + 1) * 8,
        c128_state_pool_size=1,
        page_size=page_size,
        swa_page_size=page_size,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=3,
        device=device,
        enable_memory_saver=False,
        compression_ratios=[4, 128, 4],
        start_layer=0,
        end_layer=3,
    )


def dsa_pool(*, head_num, head_dim, **shared):
    """In place of the fixtures' MHATokenToKVPool."""
    return DSATokenToKVPool(**shared, kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48, index_head_dim=128)


def paged_allocator(*, size, dtype, device, kvcache, need_sort):
    """In place of the fixtures' TokenToKVPoolAllocator: pages of an indexer cannot be cut."""
    return PagedTokenToKVPoolAllocator(size, kvcache.page_size, dtype, device, kvcache, need_sort)


def use_deepseek(case):
    case.replace_pools(SWAKVPool=v4_pool, MHATokenToKVPool=dsa_pool, TokenToKVPoolAllocator=paged_allocator)


class DeepSeek(CacheFixtures):
    def setUp(self):
        super().setUp()
        use_deepseek(self)

    def test_v4_without_one_page_of_one_pool(self):
        """The anchor's pages are there always; what can be restored is what every pool beside it has."""
        options = {"layout": "page_first", "io": "kernel", "interface": "v1"}
        producer, sequence, stored = self.produce(V4, **options)
        controller = producer.cache_controller
        self.assertIsInstance(controller.mem_pool_host.anchor_entry.host_pool, LogicalHostPool)
        self.assertEqual(set(stored), {"kv", *V4_WHOLE, *V4_TRAILING})
        backend = controller.storage_backend
        pages = len(sequence) // V4.page_size
        for name, missing in [*((name, 2) for name in V4_WHOLE), *((name, pages - 1) for name in V4_TRAILING)]:
            keys = self.keys(producer, sequence)
            there = {pool: backend._sharing.lookup([(backend._pools[pool], keys)])[0] for pool in backend._pools}
            self.assertTrue(there[name][missing])
            there[name][missing] = False
            self.remove(backend, name, keys[missing])
            possible = [
                length
                for length in range(1, pages + 1)
                if all(all(there[pool][:length]) for pool in V4_WHOLE)
                and all(there[pool][length - 1] for pool in V4_TRAILING)
            ]
            self.assertNotIn(pages, possible)
            _, restored = self.consume(sequence, **options)
            self.assertEqual(len(restored.get("kv", ())), max(possible, default=0), name)
            for pool in V4_WHOLE:
                for index, page in enumerate(restored.get(pool, ())):
                    self.assertTrue(torch.equal(page, stored[pool][index]), f"page {index} of {pool}, {self.seed}")
            self._write_path_to_l3(producer, self.leaf(producer, sequence))
            self._flush_l3_backups(producer)
        self.assertEqual(len(self.consume(sequence, **options)[1]["kv"]), pages)

    def leaf(self, cache, sequence):
        return match_prefix(cache, sequence).last_device_node

    def keys(self, cache, sequence):
        chain = self._path_chain(cache, self.leaf(cache, sequence))
        return [key for node in chain for key in cache.tree_core.get_hash_values(node)]

    def remove(self, backend, name, key):
        pool = backend._pools[name]
        namespace = backend._sharing._namespaces[pool.name, pool.geometry]
        result = backend._sharing._client.remove(namespace, page_ids([key]), ALL_PARTS, deadline_ms=5000)
        self.assertTrue(result.ok)


def _define():
    kinds = (("v4", V4), ("dsa", DSA))
    for (name, cfg), (layout, io), interface, policy in itertools.product(kinds, LAYOUTS, ("generic", "v1"), POLICIES):
        options = {"layout": layout, "io": io, "interface": interface, "policy": policy}

        def test(self, cfg=cfg, options=options):
            self.round_trip(cfg, **options)

        setattr(DeepSeek, f"test_{name}_{layout}_{io}_{interface}_{policy}", test)


_define()

if __name__ == "__main__":
    unittest.main()

"""Runs inside SGLang's environment: UnifiedRadixCache with DfkvLinker, from one cache's device pools to a second's.

usage: linkers.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS and DFKV_TEST_PIDS are those of a dfkv node)
"""

import ctypes
import itertools
import os
import random
import signal
import statistics
import time
import unittest
from array import array
from unittest import mock

import prepare  # noqa: F401  (first)
import torch
from caches import CacheFixtures
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from stopping import stop_process

from dfkv_connectors.sglang import linker as dfkv_linker

LOOKUP_MS = dfkv_linker.LOOKUP_MS
_names = itertools.count()
SWA_MAMBA = CacheConfig(
    page_size=64,
    components=(ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA),
    sliding_window_size=64,
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
    kv_size=4096,
    max_context_len=4096,
)
PAGES = 6


class LinkerFixtures(CacheFixtures):
    """Caches with linkers, of the rank that this process is."""

    cfg = SWA_MAMBA
    place = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}  # among SGLang's ranks

    def setUp(self):
        super().setUp()
        # A busy machine must not decide what is found.
        self.wait_for_lookups(10000.0)

    def wait_for_lookups(self, limit_ms):
        patch = mock.patch.object(dfkv_linker, "LOOKUP_MS", limit_ms)
        patch.start()
        self.addCleanup(patch.stop)

    def linked(self, **extra):
        """A cache with a linker of its own, and what the linker moves: {(pool, key): bytes} of saves and of loads."""
        override = get_parallel().override(**self.place)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)
        fixture = build_fixture(self.cfg)
        cache = fixture[0]
        linker = create_unified_cache_linker(
            get_server_args(),
            cache.cache_init_params,
            backend="dynamic",
            config={
                "linker": "DfkvLinker",
                "linker_module_path": "dfkv_connectors.sglang.linker",
                "linker_extra_config": {
                    "addresses": [os.environ["DFKV_TEST_ADDRESS"]],
                    "weights_id": "linkers",
                    **extra,
                },
            },
            components=set(cache.components),
        )
        cache.init_cache_linker(linker)
        self.addCleanup(linker.close)
        # The first call waits for the connection.
        linker._sharing.lookup([(next(iter(linker._pools.values())), ["00" * 32])], 5000)
        return (*fixture, linker, self.recorded(linker))

    def recorded(self, linker):
        moved = {True: {}, False: {}}
        move = linker._move

        def record(transfers, *, save):
            done = move(transfers, save=save)
            for transfer in transfers if done else ():
                entry = linker.pools[transfer.name]
                addresses, sizes = entry.get_page_buffer_meta(transfer.host_indices)
                runs = len(addresses) // len(transfer.keys)
                for index, key in enumerate(transfer.keys):
                    span = range(index * runs, (index + 1) * runs)
                    moved[save][str(transfer.name), key] = b"".join(
                        ctypes.string_at(addresses[at], sizes[at]) for at in span
                    )
            return done

        linker._move = record
        return moved

    def produce(self, sequence):
        """Returns what was stored, as recorded()."""
        linked = self.filled()
        self.offload(linked, sequence)
        return linked[-1][True]

    def filled(self):
        """As linked(), with random bytes in the device pools."""
        linked = self.linked()
        linker = linked[-2]
        for entry in linker.pools.values():  # before the insertion, which may offload
            for buffer in entry.kv_buffer:
                self.assertTrue(buffer.is_contiguous())
                flat = buffer.view(torch.uint8)
                flat.copy_(torch.randint(0, 128, flat.shape, dtype=torch.uint8))
        return linked

    def offload(self, linked, sequence):
        cache, allocator, requests, *_ = linked
        self._insert(cache, allocator, requests, sequence)
        leaf = match_prefix(cache, sequence).last_device_node
        cache.linker.offload_nodes(self._path_chain(cache, leaf))
        self._pump_hicache_until(cache, lambda: not cache.linker.pending_offloads, "not offloaded")

    def consume(self, sequence, during=lambda: None):
        """Returns (tokens that were found, tokens that were loaded, what was moved)."""
        cache, _, requests, linker, moved = self.linked()
        request = self._make_req(requests)
        request.rid = f"r{next(_names)}"
        key = RadixKey(array("q", sequence))
        match = cache.match_prefix(MatchPrefixParams(key=key, req=request))
        self._apply_match_to_req(request, match)
        found = match.host_hit_length
        during()
        loaded, _ = cache.linker.load_back(request)
        index = cache.ready_to_load_host_cache()
        self.assertEqual(index >= 0, loaded > 0)
        self.assertEqual(cache.linker.finish_loads(), [])
        self.assertEqual(linker.counters.total("faults"), 0)
        return found, loaded, moved[False]

    def sequence(self):
        return self._make_seq(random.randrange(1 << 20), PAGES)


class Linkers(LinkerFixtures):
    def test_device_pools_are_restored_byte_for_byte(self):
        sequence = self.sequence()
        stored = self.produce(sequence)
        found, loaded, restored = self.consume(sequence)
        self.assertEqual((found, loaded), (len(sequence), len(sequence)))
        self.assertEqual({pool for pool, _ in restored}, {"kv", "swa", "mamba"})
        self.assertEqual(sum(pool == "kv" for pool, _ in restored), PAGES)
        for name, page in restored.items():
            self.assertEqual(page, stored[name], name)

    def test_another_suffix_finds_no_boundary_within(self):
        """Sliding window and Mamba are there at the end of what was stored alone."""
        sequence = self.sequence()
        self.produce(sequence)
        other = sequence[: 3 * 64] + self.sequence()
        self.assertEqual(self.consume(other)[:2], (0, 0))

    def test_a_load_that_does_not_arrive_is_refused(self):
        """Between lookup and load the pages go: nothing is aborted, the request computes."""
        sequence = self.sequence()
        self.produce(sequence)
        eraser = self.linked()[3]
        self.assertTrue(eraser._sharing.lookup([(pool, ["00" * 32]) for pool in eraser._pools.values()]))
        found, loaded, _ = self.consume(sequence, during=eraser._sharing.erase)
        self.assertEqual((found, loaded), (len(sequence), 0))

    def test_a_silent_node_costs_the_scheduler_little(self):
        sequence = self.sequence()
        self.produce(sequence)
        cache, allocator, requests, linker, _ = self.linked(save_deadline_ms=1000)
        self.wait_for_lookups(LOOKUP_MS)
        pids = [int(pid) for pid in os.environ["DFKV_TEST_PIDS"].split(",")]
        for pid in pids:
            stop_process(pid)
        try:
            times = []
            request = self._make_req(requests)
            for _ in range(50):
                started = time.monotonic()
                match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", sequence)), req=request))
                times.append(time.monotonic() - started)
                self.assertEqual(match.host_hit_length, 0)
            self.assertLess(statistics.median(times), max(times) / 4, "every lookup waits for the node")
            fresh = self.sequence()
            self._insert(cache, allocator, requests, fresh)
            leaf = match_prefix(cache, fresh).last_device_node
            cache.linker.offload_nodes(self._path_chain(cache, leaf))
            self._pump_hicache_until(cache, lambda: not cache.linker.pending_offloads, "an offload never ends")
            started = time.monotonic()
            linker.reset()
            self.assertLess(time.monotonic() - started, 8.0)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    unittest.main()

"""Runs inside SGLang's environment: DfkvHiCache itself, over real host pools and a real node.

usage: contract.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS and DFKV_TEST_PIDS are those of a dfkv node)
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
import types
import unittest
from unittest import mock

import prepare  # noqa: F401  (first)
import torch
from controllers import PAGE, make_host_pool, make_pool, page_bytes
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from stopping import stop_process

from dfkv_connectors.sglang import DfkvHiCache

ADDRESS = os.environ["DFKV_TEST_ADDRESS"]
MOST_CALL_S = 8.0  # SGLang gives up on a thread after 10
_names = itertools.count()


def keys_of(name, count):
    return [hashlib.sha256(f"{name} {index}".encode()).hexdigest() for index in range(count)]


def storage_config(**changes):
    extra = {"addresses": [ADDRESS], "weights_id": "contract", "interface_v1": 1, "lookup_deadline_ms": 3000}
    extra |= changes.pop("extra", {})
    base = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="model",
        extra_config=extra,
    )
    return dataclasses.replace(base, **changes)


class Contract(unittest.TestCase):
    def setUp(self):
        override = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        override.__enter__()
        self.addCleanup(override.__exit__, None, None, None)
        self.name = f"contract {os.getpid()} {next(_names)}"

    def backend(self, kind="mha", layout="page_first", io="kernel", **changes):
        host = make_host_pool(make_pool(kind), layout, io)
        made = DfkvHiCache(storage_config(**changes), {})
        made.register_mem_pool_host(host)
        made.on_host_pools_registered()
        self.addCleanup(made.close)
        return made

    def fill(self, backend, count):
        """Random pages in the pool. Returns their indices and bytes."""
        host = backend.mem_pool_host
        flat = host.kv_buffer.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
        indices = host.alloc(count * PAGE)
        return indices, page_bytes(host, indices[::PAGE].tolist())

    def test_booleans_are_exact_for_each_page(self):
        writer, reader = self.backend(), self.backend()
        keys = keys_of(self.name, 12)
        present = [index not in (5, 9) for index in range(12)]
        indices, pages = self.fill(writer, 12)
        for index, there in enumerate(present):
            if there:
                self.assertEqual(writer.batch_set_v1([keys[index]], indices[index * PAGE : (index + 1) * PAGE]), [True])
        self.assertEqual(reader.batch_exists(keys), 5)
        self.assertEqual(reader.batch_exists(keys[6:]), 3)
        self.assertTrue(reader.exists(keys[0]))
        self.assertFalse(reader.exists(keys[5]))
        into = reader.mem_pool_host.alloc(12 * PAGE).flip(0).reshape(-1, PAGE).flip(1).reshape(-1)
        self.assertEqual(reader.batch_get_v1(keys, into), present)
        found = page_bytes(reader.mem_pool_host, into[::PAGE].tolist())
        for index, there in enumerate(present):
            if there:
                self.assertTrue(torch.equal(found[index], pages[index]), index)
        self.assertEqual(writer.batch_set_v1(keys, indices), [True] * 12)  # what is there already counts as stored
        self.assertEqual(reader.batch_exists(keys), 12)

    def test_any_text_is_a_key(self):
        backend = self.backend(extra={"interface_v1": 0, "weights_id": f"{self.name} {time.time_ns()}"})
        keys = [f"{self.name} é", "", keys_of(self.name, 1)[0], "ab" * 31 + "zz"]
        values = [torch.randint(0, 256, (4096,), dtype=torch.uint8) for _ in keys]
        self.assertTrue(backend.batch_set(keys, values))
        self.assertEqual(backend.batch_exists(keys), 4)
        blank = [torch.zeros(4096, dtype=torch.uint8) for _ in keys]
        for found, value in zip(backend.batch_get(keys, blank), values, strict=True):
            self.assertTrue(torch.equal(found, value))
        self.assertIsNone(backend.get("another", torch.zeros(4096, dtype=torch.uint8)))
        self.assertIsNone(backend.get(keys[0], torch.zeros(2048, dtype=torch.uint8)))  # another size is another page
        self.assertIsNone(backend.get(keys[0]))
        self.assertFalse(backend.set(keys[0]))

    def test_wrong_calls_are_misses(self):
        backend = self.backend()
        keys = keys_of(self.name, 3)
        with self.assertLogs("sglang.dfkv", logging.ERROR):
            self.assertEqual(backend.batch_set_v1(keys, torch.arange(PAGE)), [False] * 3)
        size = backend.mem_pool_host.size
        self.assertEqual(backend.batch_get_v1(keys[:1], torch.arange(size, size + PAGE)), [False])
        self.assertEqual(backend.batch_get_v1([], torch.arange(0)), [])
        self.assertEqual(backend.batch_exists([]), 0)
        unknown = PoolTransfer(name="mamba", host_indices=torch.arange(3), keys=keys)
        self.assertEqual(backend.batch_set_v2([unknown]), {"mamba": [False] * 3})
        self.assertEqual(backend.batch_exists_v2(keys, [unknown]).kv_hit_pages, 0)
        self.assertEqual(backend.counters.total("faults"), 2)

    def test_side_pools_and_their_policies(self):
        """A logical anchor, whose pages are those of the pools beside it, and a real one."""
        keys = keys_of(self.name, 8)
        for logical in (True, False):
            backend = self.backend()
            side = make_host_pool(make_pool("mha"), "page_first", "kernel")
            if logical:
                backend = DfkvHiCache(storage_config(), {})
                self.addCleanup(backend.close)
                backend.register_mem_pool_host(LogicalHostPool(64, PAGE))
            backend.register_mem_host_pool_v2(side, "swa")
            suffixed = [hashlib.sha256(f"{key} {logical}".encode()).hexdigest() for key in keys]
            flat = side.kv_buffer.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
            indices = side.alloc(8 * PAGE)
            pages = page_bytes(side, indices[::PAGE].tolist())
            if logical:
                self.assertEqual(backend.batch_exists(suffixed), 0)  # alone it proves nothing
                self.assertEqual(backend.batch_set_v1(suffixed, indices), [True] * 8)
                self.assertEqual(backend.batch_get_v1(suffixed, indices), [True] * 8)
            else:
                kv, _ = self.fill(backend, 8)
                self.assertEqual(backend.batch_set_v1(suffixed, kv), [True] * 8)
            for index in (0, 1, 2, 4, 5, 7):
                transfer = PoolTransfer(
                    name="swa", host_indices=indices[index * PAGE : (index + 1) * PAGE], keys=[suffixed[index]]
                )
                self.assertEqual(backend.batch_set_v2([transfer]), {"swa": [True]})
            every = PoolTransfer(name="swa", keys=suffixed)
            window = PoolTransfer(name="swa", keys=suffixed[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            found = backend.batch_exists_v2(suffixed, [every], HiCacheStorageExtraInfo())
            self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (3, [1, 2, 3]))
            found = backend.batch_exists_v2(suffixed, [window])
            self.assertEqual((found.kv_hit_pages, found.restorable_prefix_pages), (6, [1, 2, 3, 6]))
            self.assertEqual(found.extra_pool_hit_pages, {"kv": 8, "swa": 6})
            groups = PoolTransfer(
                name="swa", keys=suffixed[:4], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=2
            )
            found = backend.batch_exists_v2(suffixed, [groups])
            self.assertEqual((found.kv_hit_pages, found.extra_pool_hit_pages["swa"]), (8, 4))
            if logical:
                self.assertEqual(backend.batch_exists_v2(suffixed, []).kv_hit_pages, 0)
            into = side.alloc(8 * PAGE)
            read = backend.batch_get_v2([PoolTransfer(name="swa", host_indices=into, keys=suffixed)])
            self.assertEqual(read, {"swa": [index not in (3, 6) for index in range(8)]})
            copied = page_bytes(side, into[::PAGE].tolist())
            self.assertTrue(all(torch.equal(copied[index], pages[index]) for index in (0, 1, 2, 4, 5, 7)))

    def test_versions_without_restorable_lengths_get_the_longest(self):
        """In older versions a result has two fields, and the configuration fewer."""
        result = dataclasses.make_dataclass("PoolTransferResult", ["kv_hit_pages", "extra_pool_hit_pages"])
        keys = keys_of(self.name, 3)
        config = storage_config()
        old = types.SimpleNamespace(tp_rank=0, tp_size=1, model_name="model", extra_config=config.extra_config)
        backend = DfkvHiCache(old, {})
        self.addCleanup(backend.close)
        backend.register_mem_pool_host(make_host_pool(make_pool("mha"), "page_first", "kernel"))
        indices, _ = self.fill(backend, 3)
        self.assertEqual(backend.batch_set_v1(keys[:2], indices[: 2 * PAGE]), [True] * 2)
        with mock.patch("dfkv_connectors.sglang.backend.PoolTransferResult", result):
            found = backend.batch_exists_v2(keys, [PoolTransfer(name="kv", keys=keys)])
        self.assertEqual((found.kv_hit_pages, found.extra_pool_hit_pages), (2, {"kv": 2}))

    def test_pools_do_not_mix(self):
        """The same hash in another pool is another object."""
        backend = self.backend()
        side = make_host_pool(make_pool("mha"), "page_first", "kernel")
        backend.register_mem_host_pool_v2(side, "draft")
        keys = keys_of(self.name, 2)
        indices, _ = self.fill(backend, 2)
        self.assertEqual(backend.batch_set_v1(keys, indices), [True] * 2)
        into = side.alloc(2 * PAGE)
        self.assertEqual(
            backend.batch_get_v2([PoolTransfer(name="draft", host_indices=into, keys=keys)]), {"draft": [False] * 2}
        )

    def test_servers_that_differ_miss_with_the_reason(self):
        keys = keys_of(self.name, 2)
        # Far from every other namespace of the node, so that the writer's is the nearest.
        extra = {"weights_id": self.name, "fleet_salt": self.name}
        far = {"pp_size": random.randrange(100, 30000), "attn_cp_size": random.randrange(100, 30000)}
        writer = self.backend(extra=extra, **far)
        indices, _ = self.fill(writer, 2)
        self.assertEqual(writer.batch_set_v1(keys, indices), [True] * 2)
        variants = [
            ("weights_digest", {"extra": {**extra, "weights_id": self.name + "'"}, **far}),
            ("fleet_salt", {"extra": {**extra, "fleet_salt": "ours"}, **far}),
            ("page_format", {"layout": "page_head", "extra": extra, **far}),
            ("page_layout", {"kind": "mla", "extra": extra, **far}),
            ("pp_size", {"extra": extra, **far, "pp_size": 6}),
            ("pcp_size", {"extra": extra, **far, "attn_cp_size": 8}),
        ]
        for field, changes in variants:
            other = self.backend(**changes)
            with self.assertLogs("sglang.dfkv", logging.INFO) as logs:
                until = time.monotonic() + 10
                while not any("differs in" in line for line in logs.output) and time.monotonic() < until:
                    self.assertEqual(other.batch_exists(keys), 0, field)
            self.assertIn(field, logs.output[-1])
            self.assertGreater(
                other.counters.total("lookups", "kv", "namespace_unknown")
                + other.counters.total("lookups", "kv", "not_found"),
                0,
            )
        # The other rank of as many: the page is there, its part is not.
        rank = self.backend(tp_rank=1, tp_size=2, extra=extra, **far)
        self.assertEqual(rank.batch_exists(keys), 0)
        self.assertEqual(rank.batch_get_v1(keys, indices), [False] * 2)
        self.assertGreater(rank.counters.total("pages", "lookup", "kv", "part_missing"), 0)

    def test_head_granules_are_shared_between_tensor_parallel_sizes(self):
        """page_head with tp_lcm_size: one rank of one stores granules that rank 1 of two reads."""
        keys = keys_of(self.name, 3)
        whole = self.backend(layout="page_head", tp_lcm_size=2, should_split_heads=True)
        indices, _ = self.fill(whole, 3)
        self.assertEqual(whole.batch_set_v1(keys, indices), [True] * 3)
        half_pool = make_pool("mha-half")
        host = make_host_pool(half_pool, "page_head", "kernel")
        half = DfkvHiCache(storage_config(tp_rank=1, tp_size=2, tp_lcm_size=2), {})
        self.addCleanup(half.close)
        half.register_mem_pool_host(host)
        into = host.alloc(3 * PAGE)
        self.assertEqual(half.batch_exists(keys), 3)
        self.assertEqual(half.batch_get_v1(keys, into), [True] * 3)
        for mine, theirs in zip(into[::PAGE].tolist(), indices[::PAGE].tolist(), strict=True):
            found, wanted = host.kv_buffer[:, mine // PAGE], whole.mem_pool_host.kv_buffer[:, theirs // PAGE, 2:]
            self.assertTrue(torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)))

    def test_zz_weights_updated_in_place_end_the_sharing(self):
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        keys = keys_of(self.name, 2)
        backend = self.backend()
        indices, _ = self.fill(backend, 2)
        self.assertEqual(backend.batch_set_v1(keys, indices), [True] * 2)
        with self.assertRaises(AttributeError):  # there is no model
            WeightUpdater.update_weights_from_disk(None, "nowhere", "auto")
        self.assertEqual(backend.batch_exists(keys), 0)
        self.assertEqual(backend.batch_set_v1(keys, indices), [False] * 2)
        self.assertEqual(backend.counters.total("refused", "weights were updated in place"), 2)
        self.assertEqual(self.backend().batch_exists(keys), 0, "attaching again does not make the weights the files'")

    def test_a_server_without_files_shares_nothing_and_says_why(self):
        backend = self.backend(extra={"weights_id": ""})
        keys = keys_of(self.name, 1)
        with self.assertLogs("sglang.dfkv", logging.WARNING) as logs:
            self.assertEqual(backend.batch_exists(keys), 0)
        self.assertIn("weights_id", logs.output[0])

    def test_a_wrong_key_is_said_at_start(self):
        with self.assertRaisesRegex(ValueError, "addresses"):
            DfkvHiCache(storage_config(extra={"adresses": ["127.0.0.1"]}), {})

    def test_many_threads_at_once(self):
        backend = self.backend()
        indices, _ = self.fill(backend, 8)
        errors = []

        def work(number):
            keys = keys_of(f"{self.name} {number}", 8)
            for _ in range(10):
                done = backend.batch_set_v1(keys, indices), backend.batch_exists(keys)
                if done != ([True] * 8, 8):
                    errors.append(done)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(errors, [])

    def test_no_call_outlasts_the_engines_patience(self):
        """The node is stopped in the middle: silent, its connections open."""
        backend = self.backend(
            extra={"lookup_deadline_ms": 60_000, "load_deadline_ms": 60_000, "save_deadline_ms": 60_000}
        )
        keys = keys_of(self.name, 4)
        indices, _ = self.fill(backend, 4)
        self.assertEqual(backend.batch_set_v1(keys, indices), [True] * 4)
        transfer = PoolTransfer(name="kv", host_indices=indices, keys=keys)
        fresh = keys_of(self.name + "'", 4)
        calls = {
            "batch_exists": (lambda: backend.batch_exists(keys), 0),
            "batch_get_v1": (lambda: backend.batch_get_v1(keys, indices), [False] * 4),
            "batch_set_v1": (lambda: backend.batch_set_v1(fresh, indices), [False] * 4),
            "batch_exists_v2": (lambda: backend.batch_exists_v2(keys, [transfer]).kv_hit_pages, 0),
            "batch_get_v2": (lambda: backend.batch_get_v2([transfer, transfer]), {"kv": [False] * 8}),
            "clear": (backend.clear, None),
            "get_stats": (backend.get_stats, None),
        }
        pids = [int(pid) for pid in os.environ["DFKV_TEST_PIDS"].split(",")]
        for pid in pids:
            stop_process(pid)
        try:
            for name, (call, miss) in calls.items():
                started = time.monotonic()
                self.assertEqual(call(), miss, name)
                seconds = time.monotonic() - started
                print(json.dumps({"call": name, "silent_node_s": round(seconds, 3)}))
                self.assertLess(seconds, MOST_CALL_S, name)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + 15
        while backend.batch_get_v1(keys, indices) != [True] * 4:
            self.assertLess(time.monotonic(), until, "the node that goes on is not used again")
            time.sleep(0.1)
        started = time.monotonic()
        backend.close()
        self.assertLess(time.monotonic() - started, MOST_CALL_S)
        self.assertEqual(backend.batch_exists(keys), 0)

    def test_a_lookup_of_many_pages_is_one_round_trip(self):
        """6,000 pages at once, as the hybrid path asks; p50 is printed, and compared with as many single lookups."""
        backend = self.backend(extra={"interface_v1": 0})
        keys = keys_of(self.name, 6000)
        value = torch.zeros(4096, dtype=torch.uint8)
        for at in range(0, 6000, 500):
            self.assertTrue(backend.batch_set(keys[at : at + 500], [value] * 500))
        self.assertEqual(backend.batch_exists(keys), 6000)
        many = [self.timed(lambda: backend.batch_exists(keys)) for _ in range(40)]
        one = [self.timed(lambda: backend.batch_exists(keys[:1])) for _ in range(40)]
        stats = [self.timed(backend.get_stats) for _ in range(1000)]
        median = statistics.median
        print(
            json.dumps(
                {"lookup_6000_p50_ms": round(median(many) * 1e3, 3), "lookup_1_p50_ms": round(median(one) * 1e3, 3)}
            )
        )
        print(json.dumps({"get_stats_p50_us": round(median(stats) * 1e6, 3)}))
        self.assertLess(median(many), 600 * median(one))
        self.assertLess(median(stats), median(one))

    @staticmethod
    def timed(call):
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


if __name__ == "__main__":
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
    random.seed()
    unittest.main()

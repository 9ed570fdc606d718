"""Runs inside LMCache's environment: DfkvL2Adapter itself, as LMCache's controllers call it, over real nodes.

usage: contract.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS and DFKV_TEST_PIDS are those of a dfkv node,
DFKV_TEST_SMALL_ADDRESS that of one with 64 MiB)
"""

import hashlib
import itertools
import json
import logging
import os
import random
import select
import signal
import time
import unittest

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd
from stopped import stopped

from dfkv_core.client import Client

ADDRESS = os.environ["DFKV_TEST_ADDRESS"]
SMALL_ADDRESS = os.environ["DFKV_TEST_SMALL_ADDRESS"]
PIDS = [int(pid) for pid in os.environ["DFKV_TEST_PIDS"].split(",")]
SHAPE = torch.Size([2, 4, 64, 64])
OBJECT_BYTES = SHAPE.numel() * 2
RANK_0 = ObjectKey.ComputeKVRank(2, 0, 2, 0)
RANK_1 = ObjectKey.ComputeKVRank(2, 1, 2, 1)
ANSWER_S = 20.0
_names = itertools.count()
torch.set_num_threads(1)  # its threads do not survive a fork


class Engine:
    """One adapter with its arena; answers are waited for as LMCache's controllers do."""

    def __init__(self, slots=64, dtype=torch.bfloat16, address=ADDRESS, **params):
        self.buffer = torch.zeros(slots * OBJECT_BYTES, dtype=torch.uint8)
        self.dtype = dtype
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "dfkv_connectors.lmcache",
                "class_name": "DfkvL2Adapter",
                "adapter_params": {
                    "addresses": [address],
                    "weights_id": "contract",
                    "lookup_deadline_ms": 5000,
                    **params,
                },
            }
        )
        desc = L1MemoryDesc(ptr=self.buffer.data_ptr(), size=self.buffer.numel(), align_bytes=1)
        self.adapter = create_l2_adapter(config, l1_memory_desc=desc)
        self.layouts = {group: MemoryLayoutDesc(shapes=[SHAPE], dtypes=[dtype]) for group in (0, 1)}

    def objects(self, count, first=0, fill=None):
        """Objects in the arena, filled with random bytes of a seed, or as they are."""
        if fill is not None:
            generator = torch.Generator().manual_seed(fill)
            size = count * OBJECT_BYTES
            self.buffer[first * OBJECT_BYTES :][:size] = torch.randint(
                0, 256, (size,), dtype=torch.uint8, generator=generator
            )
        return [self._object(self.buffer[(first + i) * OBJECT_BYTES :][:OBJECT_BYTES]) for i in range(count)]

    def _object(self, raw):
        metadata = MemoryObjMetadata(
            shape=SHAPE, dtype=self.dtype, address=0, phy_size=OBJECT_BYTES, fmt=MemoryFormat.KV_2LTD, ref_count=1
        )
        return TensorMemoryObj(raw, metadata, parent_allocator=None)

    def _await(self, descriptor, take):
        until = time.monotonic() + ANSWER_S
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while True:
            found = take()
            if found is not None:
                return found
            assert time.monotonic() < until, "no answer"
            if poller.poll(100):
                consume_fd(descriptor)

    def store(self, keys, objects):
        number = self.adapter.submit_store_task(keys, objects)
        return self._await(
            self.adapter.get_store_event_fd(), lambda: self.adapter.pop_completed_store_tasks().get(number)
        ).is_successful()

    def look_up(self, keys, layouts=None):
        """Looks up and locks. Per key whether it was found."""
        number = self.adapter.submit_lookup_and_lock_task(keys, self.layouts if layouts is None else layouts)
        bitmap = self._await(
            self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(number)
        )
        assert self.adapter.query_lookup_and_lock_result(number) is None
        return [bitmap.test(index) for index in range(len(keys))]

    def load(self, keys, objects):
        number = self.adapter.submit_load_task(keys, objects)
        bitmap = self._await(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(number))
        assert self.adapter.query_load_result(number) is None
        return [bitmap.test(index) for index in range(len(keys))]


def keys_of(name, count, **changes):
    fields = {"model_name": "org/model", "kv_rank": RANK_0, **changes}
    return [
        ObjectKey(chunk_hash=hashlib.sha256(f"{name} {index}".encode()).digest(), **fields) for index in range(count)
    ]


def bytes_of(objects):
    return [bytes(each.raw_data.numpy()) for each in objects]


class Contract(unittest.TestCase):
    def setUp(self):
        self.name = f"contract {os.getpid()} {next(_names)}"

    def engine(self, *args, **params):
        made = Engine(*args, **params)
        self.addCleanup(made.adapter.close)
        return made

    def at_rest(self, address):
        """The node's gauges once nothing is under way on it."""
        with Client.open([address]) as client:
            until = time.monotonic() + ANSWER_S
            while True:
                (stats,) = client.node_stats().values()
                if not stats["pins"] and not stats["leases"]:
                    return stats
                self.assertLess(time.monotonic(), until, stats)
                time.sleep(0.05)

    def test_answers_are_exact_for_each_key(self):
        writer, reader = self.engine(), self.engine()
        keys = keys_of(self.name, 12)
        there = [index not in (5, 9) for index in range(12)]
        stored = writer.objects(12, fill=1)
        self.assertTrue(
            writer.store(
                [key for key, ok in zip(keys, there, strict=True) if ok],
                [each for each, ok in zip(stored, there, strict=True) if ok],
            )
        )
        self.assertEqual(reader.look_up(keys), there)
        into = reader.objects(12, first=20)[::-1]
        self.assertEqual(reader.load(keys, into), there)
        for wanted, found, ok in zip(bytes_of(stored), bytes_of(into), there, strict=True):
            self.assertEqual(wanted == found, ok)
        reader.adapter.submit_unlock(keys)
        self.assertTrue(writer.store(keys, stored))  # what is there already counts as stored
        self.assertEqual(reader.look_up(keys), [True] * 12)
        reader.adapter.submit_unlock(keys)
        self.assertEqual(reader.look_up([]), [])
        writer.adapter.delete(keys[:3])
        until = time.monotonic() + ANSWER_S
        while reader.look_up(keys) != [False] * 3 + [True] * 9:
            reader.adapter.submit_unlock(keys)
            self.assertLess(time.monotonic(), until)
        reader.adapter.submit_unlock(keys)
        self.at_rest(ADDRESS)

    def test_everything_that_changes_kv_separates(self):
        base = self.engine()
        key = keys_of(self.name, 1)
        self.assertTrue(base.store(key, base.objects(1, fill=2)))
        self.assertEqual(self.engine().look_up(key), [True])
        others = {
            "salt": (base, keys_of(self.name, 1, cache_salt="salt")),
            "rank": (base, keys_of(self.name, 1, kv_rank=RANK_1)),
            "world": (base, keys_of(self.name, 1, kv_rank=ObjectKey.ComputeKVRank(1, 0, 1, 0))),
            "group": (base, keys_of(self.name, 1, object_group_id=1)),
            "model": (base, keys_of(self.name, 1, model_name="org/another")),
            "dtype": (self.engine(dtype=torch.float16), key),
            "weights": (self.engine(weights_id="other weights"), key),
            "fleet": (self.engine(fleet_salt="another fleet"), key),
            "cache dtype": (self.engine(kv_cache_dtype="fp8_e5m2"), key),
        }
        for what, (engine, changed) in others.items():
            with self.subTest(what):
                self.assertEqual(engine.look_up(changed), [False])
                self.assertEqual(engine.load(changed, engine.objects(1)), [False])
        turned = {0: MemoryLayoutDesc(shapes=[torch.Size([4, 2, 64, 64])], dtypes=[torch.bfloat16])}
        self.assertEqual(base.look_up(key, turned), [False])

    def test_hashes_that_name_no_kv_are_refused(self):
        engine = self.engine()
        keys = [ObjectKey(chunk_hash=bytes(8), model_name="org/model", kv_rank=RANK_0)]
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            self.assertFalse(engine.store(keys, engine.objects(1)))
        self.assertIn("--hash-algorithm blake3", "".join(logs.output))
        self.assertEqual(engine.look_up(keys), [False])
        self.assertEqual(engine.load(keys, engine.objects(1)), [False])

    def test_models_without_identity_are_refused(self):
        engine = self.engine(weights_id="")
        keys = keys_of(self.name, 2, model_name="/nowhere/model")
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            self.assertFalse(engine.store(keys, engine.objects(2)))
        self.assertIn("set weights_id", "".join(logs.output))
        self.assertEqual(engine.look_up(keys), [False, False])

    def test_wrong_calls_are_misses(self):
        engine = self.engine()
        keys = keys_of(self.name, 2)
        outside = engine._object(torch.zeros(OBJECT_BYTES, dtype=torch.uint8))
        with self.assertLogs("lmcache.dfkv", logging.ERROR) as logs:
            self.assertFalse(engine.store(keys, [*engine.objects(1), outside]))
            self.assertEqual(engine.load(keys[:1], [outside]), [False])
        self.assertIn("outside the L1 arena", "".join(logs.output))
        self.assertEqual(engine.look_up(keys, {}), [False, False])
        engine.adapter.submit_unlock(keys)
        with self.assertRaises(ValueError):
            Engine(unknown_key=1)

    def test_what_is_locked_survives_pressure_until_unlocked(self):
        """Also behind a gap, which is where a node's own lease ends."""
        engine = self.engine(slots=192, address=SMALL_ADDRESS)
        locked = keys_of(self.name, 12) + keys_of(self.name, 12, kv_rank=RANK_1)
        left = keys_of(f"{self.name} left", 24)
        gap = 4
        objects = engine.objects(24, fill=3)
        stored = [index for index in range(24) if index != gap]
        self.assertTrue(engine.store([locked[index] for index in stored], [objects[index] for index in stored]))
        self.assertTrue(engine.store(left, engine.objects(24, first=24, fill=4)))
        wanted = bytes_of(objects)
        self.assertEqual(engine.look_up(locked), [index != gap for index in range(24)])
        self.assertEqual(engine.look_up(locked[:6]), [index != gap for index in range(6)])  # locked twice
        engine.adapter.submit_unlock(locked[:6])
        self.press(engine)
        self.assertLess(sum(engine.look_up(left)), 24, "there was no pressure")
        into = engine.objects(24, first=48)
        self.assertEqual(engine.load(locked, into), [index != gap for index in range(24)])
        for index in stored:
            self.assertEqual(bytes_of([into[index]]), [wanted[index]])
        engine.adapter.submit_unlock(locked)
        engine.adapter.submit_unlock(left)
        stats = self.at_rest(SMALL_ADDRESS)
        self.assertEqual(stats["leased_bytes"], 0)
        self.press(engine)
        self.press(engine)
        self.assertLess(sum(engine.look_up(locked)), 23, "what was unlocked was kept")
        engine.adapter.submit_unlock(locked)

    def press(self, engine):
        """Writes three times what the small node holds."""
        objects = engine.objects(96, first=96)
        for batch in range(3 * (64 << 20) // (96 * OBJECT_BYTES)):
            self.assertTrue(engine.store(keys_of(f"{self.name} {time.monotonic_ns()} {batch}", 96), objects))

    def test_dead_clients_leave_no_pins(self):
        """10^5 locks, of processes that are killed while they lock and unlock."""
        seed = time.time_ns() % 1000
        print(f"seed {seed}", flush=True)
        generator = random.Random(seed)
        writer = self.engine()
        keys = keys_of(self.name, 64)
        self.assertTrue(writer.store(keys, writer.objects(64, fill=5)))
        locks = 0
        while locks < 100_000:
            reader, writing = os.pipe()
            pids = [pid for pid in (victim(keys, writing, generator.random()) for _ in range(4)) if pid]
            os.close(writing)
            time.sleep(0.8 + generator.random())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            with os.fdopen(reader, "rb") as counted:
                rounds = len(counted.read())
            self.assertGreater(rounds, 0)
            locks += rounds * len(keys)
        print(f"{locks} locks", flush=True)
        self.at_rest(ADDRESS)
        self.assertEqual(writer.look_up(keys), [True] * 64)
        writer.adapter.submit_unlock(keys)
        self.at_rest(ADDRESS)

    def test_a_node_that_stands_still_costs_misses(self):
        engine = self.engine(lookup_deadline_ms=300, load_deadline_ms=300, save_deadline_ms=300)
        keys = keys_of(self.name, 8)
        objects = engine.objects(8, fill=6)
        self.assertTrue(engine.store(keys, objects))
        with stopped(PIDS):
            started_s = time.monotonic()
            adapter = engine.adapter
            adapter.submit_unlock(keys)
            numbers = [
                adapter.submit_load_task(keys, objects),
                adapter.submit_lookup_and_lock_task(keys, engine.layouts),
            ]
            self.assertLess(time.monotonic() - started_s, 0.3, "a call waited for the node")
            self.assertEqual(len(set(numbers)), 2)
            self.assertEqual(engine.look_up(keys), [False] * 8)
            self.assertEqual(engine.load(keys, objects), [False] * 8)
            self.assertFalse(engine.store(keys_of(f"{self.name} new", 8), objects))
            self.assertLess(time.monotonic() - started_s, 10.0)
            late = self.engine()
            late.adapter.submit_load_task(keys, late.objects(8))
            started_s = time.monotonic()
            late.adapter.close()
            self.assertLess(time.monotonic() - started_s, 5.0, "closing waited for the node")
            late.adapter.close()
        until = time.monotonic() + ANSWER_S
        while not all(engine.look_up(keys)):
            self.assertLess(time.monotonic(), until, "the node was not asked again")
        engine.adapter.submit_unlock(keys)

    def test_status_can_be_written_down(self):
        engine = self.engine()
        keys = keys_of(self.name, 3)
        self.assertTrue(engine.store(keys, engine.objects(3, fill=7)))
        self.assertEqual(engine.look_up(keys), [True] * 3)
        status = json.loads(json.dumps(engine.adapter.report_status()))
        self.assertTrue(status["is_healthy"])
        self.assertEqual(status["locked_key_count"], 3)
        self.assertEqual(engine.adapter.get_usage().total_bytes_used, 3 * OBJECT_BYTES)
        engine.adapter.submit_unlock(keys)
        self.assertEqual(engine.adapter.report_status()["locked_key_count"], 0)


def victim(keys, writing, share):
    """A process that locks all keys again and again and unlocks a share of them, until somebody ends it. Its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        engine = Engine(slots=1)
        while True:
            if all(engine.look_up(keys)):
                os.write(writing, b".")
                engine.adapter.submit_unlock(keys[: int(share * 1.5 * len(keys))])
    finally:
        os._exit(1)


if __name__ == "__main__":
    unittest.main(verbosity=2)

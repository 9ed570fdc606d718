"""Runs inside LMCache's environment: the remote backend of its classic mode, through its own StorageManager, between two
processes.

usage: classic.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS and DFKV_TEST_PIDS are those of a dfkv node)
       classic.py --write CASES    (the first of the two processes)
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import dataclass, field

import torch
from lmcache.lmcache_native import EngineKVFormat
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.kv_layer_groups import KVLayerGroupsManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import RemoteBackend
from lmcache.v1.storage_backend.storage_manager import StorageManager
from lmcache.v1.token_database import ChunkedTokenDatabase
from stopped import stopped

from dfkv_core.client import Client

ADDRESS = os.environ["DFKV_TEST_ADDRESS"]
PIDS = [int(pid) for pid in os.environ["DFKV_TEST_PIDS"].split(",")]
RUN = os.environ.setdefault("DFKV_TEST_RUN", f"{os.getpid()}.{time.time_ns()}")
CHUNK_TOKENS = 64
TAIL_TOKENS = 23
CHUNKS = 5
ANSWER_S = 20.0
PLUGIN, URL = "plugin", "url"
torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """One way of using LMCache; both processes make it. workers: of the writer and of the reader."""

    name: str
    url: str = PLUGIN
    model: str = "org/model@v1"
    settings: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    plugin: dict = field(default_factory=dict)
    mla: bool = False
    groups: bool = False
    workers: tuple = (1, 1)
    world: int = 2
    dtype: torch.dtype = torch.bfloat16
    tags: dict = field(default_factory=dict)

    @property
    def layerwise(self):
        return bool(self.settings.get("use_layerwise"))

    @property
    def tokens(self):
        """Of the chunks of the prompt."""
        return [CHUNK_TOKENS] * CHUNKS + [TAIL_TOKENS] * bool(self.settings.get("save_unfull_chunk"))


TAILS = {"save_unfull_chunk": True}
LAYERS = {"use_layerwise": True}
CASES = {
    case.name: case
    for case in (
        Case("plugin"),
        Case("url", url=URL),
        Case("instance", plugin={"instance": "dfkv.second"}),
        Case("without chunk meta", extra={"save_chunk_meta": False}),
        Case("tails", settings=TAILS),
        Case("tails at a url", url=URL, settings=TAILS, extra={"save_chunk_meta": False}),
        Case("mla first rank", mla=True, workers=(0, 1), extra={"save_only_first_rank": True}),
        Case("mla tails", mla=True, settings=TAILS, workers=(0, 1)),
        Case("groups", groups=True, settings=TAILS),
        Case("layers", settings=LAYERS),
        Case("layers and tails", settings=LAYERS | TAILS),
        Case("layers of mla", settings=LAYERS | TAILS, mla=True, workers=(0, 0)),
        Case("names", model="/models/a@b/c%d@1@2@ff@half", tags={"lmcache.tag.user": "x@y%z"}),
        Case("float32", dtype=torch.float32),
    )
}


class Engine:
    """LMCache's classic mode without an engine: its StorageManager with dfkv behind it."""

    def __init__(self, case, worker, **settings):
        self.case = case
        name = case.plugin.get("instance", "dfkv")
        prefix = f"remote_storage_plugin.{name}."
        extra = {
            f"{prefix}module_path": "dfkv_connectors.lmcache",
            f"{prefix}class_name": "DfkvConnectorAdapter",
            f"{prefix}weights_id": "classic",
            f"{prefix}lookup_deadline_ms": 5000,
            **case.extra,
        }
        options = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": False,
            "max_local_cpu_size": 0.25,
            "remote_serde": "naive",
            "remote_storage_plugins": [name],
            **case.settings,
        }
        if case.url == URL:
            options["remote_url"] = f"dfkv://{ADDRESS}"
        else:
            extra[f"{prefix}url"] = f"dfkv://{ADDRESS}"
        extra |= {prefix + key: value for key, value in settings.pop("plugin", {}).items()}
        extra |= settings.pop("extra", {})
        options |= settings
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(json.dumps(options | {"extra_config": extra}))  # YAML is JSON's superset
            file.flush()
            self.config = LMCacheEngineConfig.from_file(file.name)
        heads, size = (1, 96) if case.mla else (2, 32)
        self.metadata = LMCacheMetadata(
            model_name=case.model,
            world_size=case.world,
            local_world_size=case.world,
            worker_id=worker,
            local_worker_id=worker,
            kv_dtype=case.dtype,
            kv_shape=(4, 1 if case.mla else 2, CHUNK_TOKENS, heads, size),
            use_mla=case.mla,
            chunk_size=CHUNK_TOKENS,
            kv_layer_groups_manager=groups() if case.groups else None,
        )
        self.manager = StorageManager(self.config, self.metadata, event_manager=EventManager())
        backends = self.manager.storage_backends
        self.remotes = [each for each in backends.values() if isinstance(each, RemoteBackend)]
        self.remote = backends["RemoteBackend" if case.url == URL else f"RemoteBackend-{name}"]
        self.cpu = backends["LocalCPUBackend"]

    @property
    def connector(self):
        return self.remote.connection.getWrappedConnector()

    def close(self):
        self.manager.close()

    def keys(self, prompt):
        """One for each chunk, or for each layer of each chunk."""
        keys = []
        for index in range(len(self.case.tokens)):
            hash_ = int.from_bytes(hashlib.sha256(f"{RUN} {prompt} {index}".encode()).digest(), "big")
            world = 1 if self.case.extra.get("save_only_first_rank") else self.case.world
            key = CacheEngineKey(
                self.case.model, world, self.metadata.worker_id, hash_, self.case.dtype, self.case.tags or None
            )
            keys.append(key.split_layers(4) if self.case.layerwise else [key])
        return keys

    def objects(self, prompt):
        """As an engine fills them: in the order of keys()."""
        made = []
        for index, tokens in enumerate(self.case.tokens):
            of_chunk = []
            for layer in range(4 if self.case.layerwise else 1):
                memory = self.cpu.allocate(*self.layout(tokens))
                memory.byte_array.cast("B")[:] = content(prompt, index, layer, memory.get_size())
                of_chunk.append(memory)
            made.append(of_chunk)
        return made

    def layout(self, tokens):
        """Shapes, data types and format as LMCache's engine allocates them."""
        if not self.case.layerwise:
            fmt = MemoryFormat.KV_MLA_FMT if self.case.mla else MemoryFormat.KV_2LTD
            return self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), fmt
        if self.case.mla:
            return torch.Size([tokens, 96]), self.case.dtype, MemoryFormat.KV_MLA_FMT
        return torch.Size([tokens, 2, 64]), self.case.dtype, MemoryFormat.KV_T2D

    def store(self, prompt):
        keys, objects = self.keys(prompt), self.objects(prompt)
        if self.case.layerwise:
            for layer in range(4):
                self.manager.batched_put([each[layer] for each in keys], [each[layer] for each in objects])
        else:
            self.manager.batched_put([each[0] for each in keys], [each[0] for each in objects])

    def found(self, prompt):
        """Chunks from the first on, as LMCache's engine counts them."""
        keys = self.keys(prompt)
        if not self.case.layerwise:
            return self.manager.batched_contains([each[0] for each in keys])[0]
        hits = [self.manager.batched_contains(each)[0] == 4 for each in keys]
        return hits.index(False) if False in hits else len(hits)

    def load(self, prompt):
        """MemoryObj or None for each key."""
        keys = self.keys(prompt)
        if not self.case.layerwise:
            flat = [each[0] for each in keys]
            _, where = self.manager.batched_contains(flat)
            (location,) = where or {None: ()}
            return [[each] for each in self.manager.batched_get(flat, location)]
        location = next(name for name, each in self.manager.storage_backends.items() if each is self.remote)
        by_layer = [
            future.result(ANSWER_S)
            for future in self.manager.layerwise_batched_get(
                [[each[layer] for each in keys] for layer in range(4)], location=location
            )
        ]
        return [list(each) for each in zip(*by_layer, strict=True)]

    def free(self, objects):
        for memory in objects:
            memory.ref_count_down()

    def allocated(self):
        """Bytes and objects that somebody holds."""
        allocator = self.cpu.memory_allocator.pin_allocator
        return allocator.total_allocated_size, allocator.num_active_allocations

    def quiet(self):
        """Waits for the stores; then nothing may be held."""
        until = time.monotonic() + ANSWER_S
        while any(self.allocated()):
            assert time.monotonic() < until, self.allocated()
            time.sleep(0.01)


def groups():
    caches = [torch.zeros(2, 4, 16, 2, 32, dtype=torch.bfloat16)] * 3 + [torch.zeros(2, 4, 16, 1, 24)] * 2
    return KVLayerGroupsManager(caches, [EngineKVFormat.NL_X_TWO_NB_BS_NH_HS] * 5)


def content(prompt, index, layer, size):
    return hashlib.shake_256(f"{prompt} {index} {layer}".encode()).digest(size)


def write(names):
    for name in names:
        engine = Engine(CASES[name], CASES[name].workers[0])
        try:
            engine.store(name)
            engine.quiet()
        finally:
            engine.close()  # its threads would hold up the end of the process


class Classic(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        subprocess.run([sys.executable, __file__, "--write", *CASES], check=True, timeout=900)

    def engine(self, case, *args, **settings):
        made = Engine(CASES[case] if isinstance(case, str) else case, *(args or (1,)), **settings)
        self.addCleanup(made.close)
        return made

    def restores(self, engine, prompt):
        case = engine.case
        self.assertEqual(engine.found(prompt), len(case.tokens))
        loaded = engine.load(prompt)
        self.assertEqual(len(loaded), len(case.tokens))
        for index, (tokens, of_chunk) in enumerate(zip(case.tokens, loaded, strict=True)):
            shapes, dtypes, fmt = engine.layout(tokens)
            for layer, memory in enumerate(of_chunk):
                self.assertEqual(memory.get_ref_count(), 1)
                self.assertEqual(bytes(memory.byte_array), content(prompt, index, layer, memory.get_size()))
                self.assertEqual(memory.get_shapes(), shapes if isinstance(shapes, list) else [shapes])
                self.assertEqual(memory.get_dtypes(), dtypes if isinstance(dtypes, list) else [dtypes])
                self.assertEqual(memory.get_memory_format(), fmt)
        engine.free([memory for of_chunk in loaded for memory in of_chunk])
        engine.quiet()

    def test_what_one_process_stores_another_restores(self):
        for name, case in CASES.items():
            with self.subTest(name):
                engine = Engine(case, case.workers[1])
                try:
                    self.restores(engine, name)
                    self.assertEqual(engine.found("never stored"), 0)
                    self.assertEqual(len(engine.remotes), 2 if case.url == URL else 1)
                finally:
                    engine.close()

    def test_loads_that_do_not_block_give_the_prefix(self):
        engine = self.engine("tails")
        keys = [each[0] for each in engine.keys("tails")]
        missing = [each[0] for each in engine.keys("missing")]
        mixed = [*keys[:3], missing[3], *keys[4:]]

        def run(call):
            return asyncio.run_coroutine_threadsafe(call, engine.manager.loop).result(ANSWER_S)

        self.assertEqual(run(engine.remote.batched_async_contains("id", keys)), len(keys))
        self.assertEqual(run(engine.remote.batched_async_contains("id", mixed)), 3)
        loaded = run(engine.remote.batched_get_non_blocking("id", mixed))
        self.assertEqual(len(loaded), 3)
        engine.free(loaded)
        loaded = run(engine.remote.batched_get_non_blocking("id", keys))
        self.assertEqual([each.get_num_tokens() for each in loaded], engine.case.tokens)
        engine.free(loaded)
        found = engine.remote.batched_get_blocking(mixed)
        self.assertEqual([each is not None for each in found], [key not in missing for key in mixed])
        engine.free([each for each in found if each is not None])
        self.assertTrue(engine.remote.contains(keys[0]))
        self.assertTrue(engine.remote.contains(keys[-1]))
        self.assertFalse(engine.remote.contains(missing[0]))
        self.assertTrue(engine.connector.exists_sync(keys[-1]))
        one = engine.remote.get_blocking(keys[-1])
        self.assertEqual(one.get_num_tokens(), TAIL_TOKENS)
        engine.free([one])
        engine.quiet()

    def test_everything_that_changes_kv_separates(self):
        base = CASES["plugin"]
        others = {
            "weights": (base, {"plugin": {"weights_id": "other"}}),
            "fleet": (base, {"plugin": {"fleet_salt": "other"}}),
            "cache dtype": (base, {"plugin": {"kv_cache_dtype": "fp8_e5m2"}}),
            "model": (Case("other", model="org/model@v2"), {}),
            "dtype": (Case("other", dtype=torch.float16), {}),
            "world": (Case("other", world=4), {}),
            "tag": (Case("other", tags={"lmcache.tag.salt": "other"}), {}),
            "mla": (Case("other", mla=True), {}),
            "groups": (Case("other", groups=True), {}),
            "layers": (Case("other", settings=LAYERS), {}),
        }
        for what, (case, settings) in others.items():
            with self.subTest(what):
                engine = self.engine(case, **settings)
                self.assertEqual(engine.found("plugin"), 0)
                found = engine.remote.batched_get_blocking([key for each in engine.keys("plugin") for key in each])
                self.assertEqual(set(found), {None})
                engine.quiet()
        with self.subTest("worker"):
            self.assertEqual(self.engine("plugin", 0).found("plugin"), 0)
        with self.subTest("nothing"):
            self.assertEqual(self.engine("plugin").found("plugin"), CHUNKS)

    def test_a_layer_that_lost_its_number_is_not_shared(self):
        """LMCache drops the layer where it maps a rank of MLA to the first: all layers would have one name."""
        engine = self.engine(Case("other", settings=LAYERS, mla=True), 0)
        key = engine.keys("lost")[0][2]
        whole = key.with_new_worker_id(0)
        memory = engine.cpu.allocate(*engine.layout(CHUNK_TOKENS))
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            engine.manager.batched_put([whole], [memory])
            engine.quiet()
        self.assertIn("a key of a whole chunk", "".join(logs.output))
        self.assertFalse(engine.remote.contains(whole))

    def test_objects_of_another_layout_are_not_stored(self):
        engine = self.engine("plugin")
        key = engine.keys("layout")[0][0]
        shape = torch.Size([2, 2, 2 * CHUNK_TOKENS, 64])
        memory = engine.cpu.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD)
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            engine.manager.batched_put([key], [memory])
            engine.quiet()
        self.assertIn("any number of tokens was expected", "".join(logs.output))
        self.assertFalse(engine.remote.contains(key))

    def test_short_hashes_are_refused(self):
        """With what LMCache itself makes of tokens."""
        tokens = list(range(3 * CHUNK_TOKENS))
        expected = {
            ("builtin", False): "pre_caching_hash_algorithm",
            ("builtin", True): "pre_caching_hash_algorithm",
            ("sha256_cbor", False): "accept_short_hashes",
            ("sha256_cbor", True): "",
        }
        for (algorithm, accept), wanted in expected.items():
            with self.subTest(algorithm=algorithm, accept=accept):
                engine = self.engine(
                    "plugin", pre_caching_hash_algorithm=algorithm, plugin={"accept_short_hashes": accept}
                )
                database = ChunkedTokenDatabase(engine.config, engine.metadata)
                keys = [key for _, _, key in database.process_tokens(tokens)]
                self.assertEqual(len(keys), 3)
                memory = [engine.cpu.allocate(*engine.layout(CHUNK_TOKENS)) for _ in keys]
                context = self.assertLogs if wanted else self.assertNoLogs
                with context("lmcache.dfkv", logging.WARNING) as logs:
                    engine.manager.batched_put(keys, memory)
                    engine.quiet()
                self.assertIn(wanted, "".join(logs.output) if wanted else "")
                self.assertEqual(engine.manager.batched_contains(keys)[0], 0 if wanted else 3)
        # LMCache takes the builtin hash where it does not find another, whatever it was told to use.
        engine = self.engine("plugin", pre_caching_hash_algorithm="sha256_cbor", plugin={"accept_short_hashes": True})
        negative = CacheEngineKey(engine.case.model, 2, 1, -5, torch.bfloat16)
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            self.assertFalse(engine.remote.contains(negative))
        self.assertIn("builtin hash", "".join(logs.output))

    def test_wrong_settings_share_nothing_and_say_why(self):
        wrong = {
            "serializers": ({"remote_serde": "kivi"}, 'set remote_serde to "naive"'),
            "blending": ({"enable_blending": True}, "enable_blending"),
            "unknown key": ({"plugin": {"weights": "x"}}, "weights_id"),
            "no URL": ({"plugin": {"url": "redis://localhost:1"}}, "dfkv://127.0.0.1:7440"),
        }
        for what, (settings, wanted) in wrong.items():
            with self.subTest(what):
                logger = logging.getLogger("lmcache.v1.storage_backend.remote_backend")
                with self.assertLogs(logger, logging.WARNING) as logs:
                    engine = self.engine("plugin", **settings)
                self.assertIn(wanted, "".join(logs.output))
                self.assertIsNone(engine.remote.connection)
                self.assertEqual(engine.found("plugin"), 0)

    def test_models_without_identity_are_refused(self):
        engine = self.engine("plugin", plugin={"weights_id": ""})
        with self.assertLogs("lmcache.dfkv", logging.WARNING) as logs:
            self.assertEqual(engine.found("plugin"), 0)
        self.assertIn("set weights_id", "".join(logs.output))

    def test_removing(self):
        engine = self.engine("tails")
        engine.store("removed")
        engine.quiet()
        keys = [each[0] for each in engine.keys("removed")]
        self.assertEqual(engine.found("removed"), len(keys))
        self.assertTrue(engine.remote.remove(keys[-1]))
        self.assertEqual(engine.found("removed"), len(keys) - 1)
        self.assertTrue(engine.remote.remove(keys[0]))
        self.assertEqual(engine.found("removed"), 0)
        self.assertEqual(asyncio.run(engine.connector.list()), [])

    def test_no_room_in_memory_is_a_miss(self):
        engine = self.engine("plugin")
        held = []
        while (memory := engine.cpu.allocate(*engine.layout(CHUNK_TOKENS), busy_loop=False)) is not None:
            held.append(memory)
        self.assertEqual(engine.found("plugin"), CHUNKS)
        self.assertEqual(engine.load("plugin"), [[None]] * CHUNKS)
        engine.free(held)
        self.restores(engine, "plugin")

    def test_loads_leave_no_leases(self):
        engine = self.engine("layers and tails")
        engine.store("leased")
        engine.quiet()
        self.restores(engine, "leased")
        with Client.open([ADDRESS]) as client:
            until = time.monotonic() + ANSWER_S
            while True:
                (stats,) = client.node_stats().values()
                if not stats["pins"] and not stats["leases"]:
                    break
                self.assertLess(time.monotonic(), until, stats)
                time.sleep(0.05)

    def test_a_node_that_stands_still_costs_misses(self):
        limits = {"lookup_deadline_ms": 300, "load_deadline_ms": 300, "save_deadline_ms": 300}
        engine = self.engine("tails", plugin=limits)
        self.restores(engine, "tails")
        keys = [each[0] for each in engine.keys("tails")]
        with stopped(PIDS):
            for call, wanted in (
                (lambda: engine.found("tails"), 0),
                (lambda: engine.remote.contains(keys[0]), False),
                (lambda: engine.remote.batched_get_blocking(keys), [None] * len(keys)),
                (lambda: engine.store("late"), None),
                (lambda: engine.remote.remove(engine.keys("late")[0][0]), False),
            ):
                started_s = time.monotonic()
                self.assertEqual(call(), wanted)
                self.assertLess(time.monotonic() - started_s, 3.0)
            engine.quiet()
            # A caller that gives up has its memory back at once, and nothing arrives in it later.
            future = asyncio.run_coroutine_threadsafe(engine.connector.batched_get(keys), engine.manager.loop)
            time.sleep(0.05)
            future.cancel()
            engine.quiet()
            watched = engine.objects("watched")
        until = time.monotonic() + ANSWER_S
        while engine.found("tails") < len(keys):
            self.assertLess(time.monotonic(), until, "the node was not asked again")
        for index, of_chunk in enumerate(watched):
            for layer, memory in enumerate(of_chunk):
                self.assertEqual(bytes(memory.byte_array), content("watched", index, layer, memory.get_size()))
                engine.free([memory])
        self.restores(engine, "tails")

    def test_closing_with_loads_under_way(self):
        engine = self.engine("tails")
        keys = [each[0] for each in engine.keys("tails")]
        with stopped(PIDS):
            futures = [
                asyncio.run_coroutine_threadsafe(engine.connector.batched_get(keys), engine.manager.loop)
                for _ in range(3)
            ]
            time.sleep(0.1)
            started_s = time.monotonic()
            asyncio.run_coroutine_threadsafe(engine.connector.close(), engine.manager.loop).result(ANSWER_S)
            self.assertLess(time.monotonic() - started_s, 5.0)
            for future in futures:
                with contextlib.suppress(Exception):
                    self.assertEqual(future.result(ANSWER_S), [None] * len(keys))
            engine.quiet()
            self.assertEqual(engine.found("tails"), 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2:])
        sys.exit(0)
    unittest.main(verbosity=2)

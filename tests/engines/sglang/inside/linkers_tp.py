"""Runs inside SGLang's environment: UnifiedRadixCache with DfkvLinker on two tensor parallel ranks, a process each.

usage: linkers_tp.py [TEST...]        (as unittest; DFKV_TEST_ADDRESS is that of a dfkv node)
"""

import functools
import multiprocessing
import os
import random
import sys
import tempfile
import unittest
from datetime import timedelta

import prepare  # noqa: F401  (first)
import torch
from deepseek import DSA, V4, use_deepseek
from linkers import PAGES, LinkerFixtures
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from torch import distributed

RANKS = 2
COLLECTIVE_S = 60  # a rank whose peer failed waits no longer
RANK_S = 120


class Rank(LinkerFixtures):
    """What each of the ranks does. They walk together: every lookup, load and offload is agreed on."""

    def setUp(self):
        super().setUp()
        self.rank = distributed.get_rank()
        sizes = {"tp_size": RANKS, "attn_tp_size": RANKS, "moe_tp_size": RANKS}
        self.place = LinkerFixtures.place | sizes | {"tp_rank": self.rank, "attn_tp_rank": self.rank}
        self.replace_pools(CacheInitParams=functools.partial(CacheInitParams, tp_cache_group=distributed.group.WORLD))

    def linked(self, **extra):
        linked = super().linked(**extra)
        self.linker = linked[-2]
        lookup = self.linker.lookup

        def record(rid, transfers):
            self.restorable = lookup(rid, transfers)
            return self.restorable

        self.linker.lookup = record
        return linked

    def of_all_ranks(self, value):
        values = [None] * RANKS
        distributed.all_gather_object(values, value)
        return values

    def sharded(self):
        """Heads and states are each rank's own."""
        sequence = self.sequence()
        stored = self.produce(sequence)
        found, loaded, restored = self.consume(sequence)
        self.assertEqual((found, loaded), (len(sequence), len(sequence)))
        self.assertEqual(sum(pool == "kv" for pool, _ in restored), PAGES)
        self.assertEqual({pool for pool, _ in restored}, {"kv", "swa", "mamba"})
        for name, page in restored.items():
            self.assertEqual(page, stored[name], name)
        first, second = self.of_all_ranks(restored)
        self.assertEqual(first.keys(), second.keys())
        self.assertTrue(all(first[name] != second[name] for name in first))

    def replicated(self):
        """The pools of DeepSeek's models are equal on every rank: stored by the first, read by both."""
        use_deepseek(self)
        for self.cfg, pools in ((DSA, {"kv", "indexer"}), (V4, None)):
            sequence = self.sequence()
            stored, nothing = self.of_all_ranks(self.produce(sequence))
            self.assertEqual(nothing, {})
            self.assertEqual(pools or {pool for pool, _ in stored}, {pool for pool, _ in stored})
            found, loaded, restored = self.consume(sequence)
            self.assertEqual((found, loaded), (len(sequence), len(sequence)))
            self.assertEqual({pool for pool, _ in restored}, {pool for pool, _ in stored})
            for name, page in restored.items():
                self.assertEqual(page, stored[name], name)

    def different(self):
        """A rank that has lost pages: both restore what both have."""
        sequence = self.sequence()
        half = PAGES // 2 * self.cfg.page_size
        linked = self.filled()
        self.offload(linked, sequence[:half])
        stored = dict(linked[-1][True])
        if self.rank:
            self.linker._move = lambda transfers, *, save: True
        self.offload(linked, sequence)
        found, loaded, restored = self.consume(sequence)
        self.assertEqual(self.restorable, [PAGES // 2] if self.rank else [PAGES // 2, PAGES])
        self.assertEqual((found, loaded), (half, half))
        self.assertEqual(sum(pool == "kv" for pool, _ in restored), PAGES // 2)
        for name, page in restored.items():
            self.assertEqual(page, stored[name], name)

    def refused(self):
        """A load that fails on one rank is refused on both, and nothing is aborted."""
        sequence = self.sequence()
        self.produce(sequence)

        def lose():
            if self.rank:
                self.linker._move = lambda transfers, *, save: False

        found, loaded, _ = self.consume(sequence, during=lose)
        self.assertEqual((found, loaded), (len(sequence), 0))


def run_rank(rank, scenario, rendezvous, seed):
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    random.seed(seed)  # the same tokens on both, other bytes
    torch.manual_seed(seed + rank)
    result = unittest.TextTestRunner(stream=sys.stdout).run(Rank(scenario))
    sys.stdout.flush()
    os._exit(not result.wasSuccessful())


class TensorParallelLinkers(unittest.TestCase):
    def run_ranks(self, scenario):
        seed = random.randrange(1 << 30)
        fork = multiprocessing.get_context("fork")  # imports take longer than all tests
        with tempfile.TemporaryDirectory() as directory:
            arguments = [(rank, scenario, f"{directory}/rendezvous", seed) for rank in range(RANKS)]
            ranks = [fork.Process(target=run_rank, args=each) for each in arguments]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(RANK_S)
                if each.is_alive():
                    each.kill()
                    each.join()
        self.assertEqual([each.exitcode for each in ranks], [0] * RANKS, f"{scenario}, seed {seed}")

    def test_sharded(self):
        self.run_ranks("sharded")

    def test_replicated(self):
        self.run_ranks("replicated")

    def test_ranks_that_differ_agree(self):
        self.run_ranks("different")

    def test_a_load_that_fails_on_one_rank(self):
        self.run_ranks("refused")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    unittest.main()

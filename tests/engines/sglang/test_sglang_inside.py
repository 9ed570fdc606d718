"""SGLang's own controllers, caches and host pools with dfkv as storage, in SGLang's environment. See inside/."""

from collections.abc import Callable

import pytest

from tests.engines.vllm_server import DfkvServe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_caches_restore_byte_for_byte(run_inside: Callable[..., str]) -> None:
    """UnifiedRadixCache: MHA, MLA, sliding window and Mamba, every layout, generic and v1 with v2, every prefetch policy."""
    print(run_inside("caches.py")[-500:])


def test_caches_of_deepseek_restore_byte_for_byte(run_inside: Callable[..., str]) -> None:
    """UnifiedRadixCache over V4's pools with their logical anchor, and over DSA's with its indexer."""
    print(run_inside("deepseek.py")[-500:])


def test_controllers_restore_byte_for_byte(run_inside: Callable[..., str]) -> None:
    """HiCacheController: MHA and MLA, every layout, generic and v1."""
    print(run_inside("controllers.py")[-500:])


def test_linkers_restore_byte_for_byte(run_inside: Callable[..., str], sglang_node: DfkvServe) -> None:
    """UnifiedCacheLinker: full, sliding window and Mamba, from device pools to device pools."""
    pids = ",".join(str(pid) for pid in sglang_node.pids())
    print(run_inside("linkers.py", env={"DFKV_TEST_PIDS": pids})[-500:])


def test_linkers_of_two_ranks_agree(run_inside: Callable[..., str]) -> None:
    """UnifiedCacheLinker on two ranks: shards, replicas, and what happens where the ranks differ."""
    print(run_inside("linkers_tp.py")[-500:])


def test_contract(run_inside: Callable[..., str], sglang_node: DfkvServe) -> None:
    """The backend's promises to SGLang, call by call."""
    pids = ",".join(str(pid) for pid in sglang_node.pids())
    print(run_inside("contract.py", env={"DFKV_TEST_PIDS": pids}))

"""LMCache and the vLLM beside it have one environment."""

import pytest

from tests.engines.setup_engine import EngineEnv, ensure_engine


@pytest.fixture(scope="session")
def lmcache_env() -> EngineEnv:
    return ensure_engine("lmcache_cpu")

"""SGLang's environment, a node, and what runs inside that environment. Servers belong to the modules that start them."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.process import run_to_end
from tests.engines.setup_engine import EngineEnv, ensure_engine
from tests.engines.sglang.server import SHIM
from tests.engines.tiny_model import TINY, ensure_model
from tests.engines.vllm_server import SITE, DfkvServe

INSIDE = Path(__file__).resolve().parent / "inside"
INSIDE_DEADLINE_S = 420.0


@pytest.fixture(scope="session")
def sglang_env() -> EngineEnv:
    return ensure_engine("sglang_cpu")


@pytest.fixture(scope="session")
def sglang_model(sglang_env: EngineEnv, logs: Path) -> Path:
    """A copy of the tiny model, whose weights a test may change."""
    path = logs / "sglang-model"
    shutil.copytree(ensure_model(sglang_env.python, TINY), path)
    return path


@pytest.fixture(scope="session")
def sglang_node(logs: Path) -> Iterator[DfkvServe]:
    with DfkvServe(logs / "sglang-node.log", ram="1GiB", name="node of the SGLang tests") as node:
        yield node


@pytest.fixture
def run_inside(sglang_env: EngineEnv, sglang_node: DfkvServe, logs: Path) -> Callable[..., str]:
    """Runs a script of inside/ in SGLang's environment; returns what it printed. Its failure is the test's."""

    def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> str:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONHASHSEED", "PYTHONPATH")}
        environment |= {
            "PYTHONPATH": f"{SHIM}:{SITE}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_TEST_MAX_RETRY": "0",  # of its fixtures, which would hide a fault now and then
            "TORCH_EXTENSIONS_DIR": str(sglang_env.path / "extensions"),
            "PATH": f"{sglang_env.path / 'bin'}:{environment.get('PATH', '')}",
            "DFKV_TEST_ADDRESS": f"127.0.0.1:{sglang_node.port}",
            **(env or {}),
        }
        command = [str(sglang_env.python), str(INSIDE / script), *arguments]
        return run_to_end(command, environment, logs, INSIDE_DEADLINE_S)

    return run

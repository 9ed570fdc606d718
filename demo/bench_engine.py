"""What dfkv costs a real vLLM engine: time inside its hooks, CPU time of its threads and node, round trips of a miss.

Everything comes from counters: the connector's own on vLLM's /metrics, and the kernel's CPU time per thread and process.
"""

import argparse
import concurrent.futures
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.engines.http_client import HttpError, Metrics
from tests.engines.process import ServerError
from tests.engines.setup_engine import EngineSetupError, ensure_engine
from tests.engines.tiny_model import SMALL, ensure_model
from tests.engines.vllm_server import ROOT, DfkvServe, VllmOptions, VllmServer, connector_config

from .report import make_console

LOGS = ROOT / "build" / "bench-engine"
THREAD_PREFIX = "dfkv"
MAX_HOOK_SHARE = 0.01
MAX_CPU_SHARE = 0.03
MAX_ROUND_TRIPS = 1.0

PREFILL_TOKENS = 4096
DECODE_REQUESTS = 4
DECODE_TOKENS = 160
MISS_TOKENS = 300


@dataclass(frozen=True)
class Reading:
    """Counters at one moment. CPU times in seconds; ``threads_cpu_s``: the connector's threads, by name."""

    at_s: float
    metrics: Metrics
    engine_cpu_s: float
    node_cpu_s: float
    threads_cpu_s: dict[str, float]

    @classmethod
    def take(cls, engine: VllmServer, node: DfkvServe) -> "Reading":
        threads = {name: cpu_s for name, cpu_s in engine.thread_cpu_s().items() if name.startswith(THREAD_PREFIX)}
        return cls(time.monotonic(), engine.client.metrics(), engine.cpu_s(), node.cpu_s(), threads)


@dataclass(frozen=True)
class Phase:
    """One kind of load, between two readings."""

    name: str
    before: Reading
    after: Reading

    def counted(self, family: str, **labels: str) -> float:
        name = f"vllm:dfkv_{family}_total"
        return self.after.metrics.total(name, **labels) - self.before.metrics.total(name, **labels)

    @property
    def hook_share(self) -> float:
        """Time inside the connector's hooks, scheduler and worker, of the time of the engine's steps."""
        steps_s = self.counted("step_seconds")
        return self.counted("hook_seconds") / steps_s if steps_s else float("inf")

    @property
    def threads_cpu_s(self) -> float:
        return sum(self.after.threads_cpu_s.values()) - sum(self.before.threads_cpu_s.values())

    @property
    def node_cpu_s(self) -> float:
        return self.after.node_cpu_s - self.before.node_cpu_s

    @property
    def engine_cpu_s(self) -> float:
        return self.after.engine_cpu_s - self.before.engine_cpu_s

    @property
    def cpu_share(self) -> float:
        """CPU time of the connector's threads and the node, of the engine's."""
        return (self.threads_cpu_s + self.node_cpu_s) / self.engine_cpu_s if self.engine_cpu_s else float("inf")

    @property
    def round_trips_per_miss(self) -> float:
        misses = self.counted("lookups") - self.counted("lookups", result="hit")
        return self.counted("lookup_round_trips") / misses if misses else float("inf")

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.name,
            "wall_s": round(self.after.at_s - self.before.at_s, 3),
            "step_s": round(self.counted("step_seconds"), 4),
            "hook_s": {role: round(self.counted("hook_seconds", role=role), 6) for role in ("scheduler", "worker")},
            "engine_cpu_s": round(self.engine_cpu_s, 3),
            "threads_cpu_s": round(self.threads_cpu_s, 4),
            "node_cpu_s": round(self.node_cpu_s, 4),
            "saved_bytes": int(self.counted("bytes", direction="save")),
            "lookups": int(self.counted("lookups")),
            "lookup_round_trips": int(self.counted("lookup_round_trips")),
        }


@dataclass(frozen=True)
class Check:
    what: str
    measured: float
    limit: float
    percent: bool = True

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit

    def show(self, value: float) -> str:
        return f"{100 * value:.3f} %" if self.percent else f"{value:.2f}"


@dataclass
class Costs:
    phases: list[Phase] = field(default_factory=list)

    def checks(self) -> list[Check]:
        saving = [phase for phase in self.phases if phase.counted("bytes", direction="save") > 0]
        checks = [
            Check(f"{phase.name}: hooks, of step time", phase.hook_share, MAX_HOOK_SHARE) for phase in self.phases
        ]
        checks += [
            Check(f"{phase.name}: threads and node, of engine CPU", phase.cpu_share, MAX_CPU_SHARE) for phase in saving
        ]
        checks.append(
            Check(
                "lookup round trips of a request that misses",
                self.phases[-1].round_trips_per_miss,
                MAX_ROUND_TRIPS,
                False,
            )
        )
        return checks


class Bench:
    """One engine, one node, three kinds of load."""

    def __init__(self, engine: VllmServer, node: DfkvServe, repeats: int, misses: int, seed: int) -> None:
        self._engine = engine
        self._node = node
        self._repeats = repeats
        self._misses = misses
        self._random = random.Random(seed)

    def run(self, say: Callable[[str], None]) -> Costs:
        self._complete(self._prompt(300), 8)
        self._complete(self._prompt(300), 8)
        costs = Costs()
        for name, work in (
            ("prefill, saving", self._prefill),
            ("decode, saving", self._decode),
            ("misses", self._miss),
        ):
            self._node.wait_quiet()
            before = Reading.take(self._engine, self._node)
            work()
            self._node.wait_quiet()
            self._settle(before)
            costs.phases.append(Phase(name, before, Reading.take(self._engine, self._node)))
            say(f"{name}: {costs.phases[-1].after.at_s - before.at_s:.1f} s")
        return costs

    def _prefill(self) -> None:
        for _ in range(self._repeats):
            self._complete(self._prompt(PREFILL_TOKENS), 1)

    def _decode(self) -> None:
        prompts = [self._prompt(100) for _ in range(DECODE_REQUESTS)]
        with concurrent.futures.ThreadPoolExecutor(DECODE_REQUESTS) as pool:
            list(pool.map(lambda prompt: self._complete(prompt, DECODE_TOKENS), prompts))

    def _miss(self) -> None:
        for _ in range(self._misses):
            self._complete(self._prompt(MISS_TOKENS), 1)

    def _settle(self, before: Reading, deadline_s: float = 3.0) -> None:
        """Waits until the counters stand still: they come with the engine's steps."""
        until = time.monotonic() + deadline_s
        seen = -1.0
        while time.monotonic() < until:
            now = self._engine.client.metrics().total("vllm:dfkv_hook_seconds_total")
            if now == seen and now > before.metrics.total("vllm:dfkv_hook_seconds_total"):
                return
            seen = now
            time.sleep(0.2)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(256), k=tokens)

    def _complete(self, prompt: list[int], tokens: int) -> None:
        self._engine.client.complete(prompt, max_tokens=tokens)


def print_costs(console: Console, costs: Costs) -> None:
    table = Table(
        title="what dfkv costs the engine", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    table.add_column("phase", no_wrap=True)
    for name in ("steps s", "hooks ms", "engine CPU s", "threads CPU s", "node CPU s", "MB saved", "lookups"):
        table.add_column(name, justify="right")
    for phase in costs.phases:
        table.add_row(
            phase.name,
            f"{phase.counted('step_seconds'):.2f}",
            f"{1e3 * phase.counted('hook_seconds'):.1f}",
            f"{phase.engine_cpu_s:.2f}",
            f"{phase.threads_cpu_s:.3f}",
            f"{phase.node_cpu_s:.3f}",
            f"{phase.counted('bytes', direction='save') / 1e6:.1f}",
            f"{phase.counted('lookups'):.0f}",
        )
    console.print()
    console.print(table)
    console.print()
    for check in costs.checks():
        mark = "[green]pass[/]" if check.passed else "[red]fail[/]"
        console.print(f"  {mark}  {check.what}: {check.show(check.measured)}, at most {check.show(check.limit)}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.bench_engine", description=__doc__)
    parser.add_argument("--repeats", type=int, default=4, help=f"prompts of {PREFILL_TOKENS} tokens (default 4)")
    parser.add_argument("--misses", type=int, default=20, help="requests that find nothing (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts (default 1)")
    parser.add_argument("--json", type=Path, default=Path("bench-engine.json"), help="default bench-engine.json")
    options = parser.parse_args(arguments)
    console = make_console()
    start = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:5.0f} s[/]  {line}")

    try:
        environment = ensure_engine("vllm_cpu", say)
        model = ensure_model(environment.python, SMALL)
        node = DfkvServe(LOGS / "dfkv-serve.log", ram="4GiB")
        engine = VllmServer(
            environment,
            VllmOptions(model, connector=connector_config(node.port), max_model_len=PREFILL_TOKENS + 512),
            LOGS / "vllm.log",
        )
        with node, console.status("starting vLLM"), engine:
            say(f"vLLM is ready; random prompts of seed {options.seed}")
            costs = Bench(engine, node, options.repeats, options.misses, options.seed).run(say)
            names = sorted(Reading.take(engine, node).threads_cpu_s)
    except (EngineSetupError, ServerError, HttpError, OSError) as error:
        console.print(f"[red]error:[/] {type(error).__name__}: ", end="")
        console.print(str(error), markup=False)
        return 2
    print_costs(console, costs)
    checks = costs.checks()
    passed = all(check.passed for check in checks)
    report = {
        "passed": passed,
        "seed": options.seed,
        "threads": names,
        "phases": [phase.to_json() for phase in costs.phases],
        "checks": [
            {"what": check.what, "measured": check.measured, "limit": check.limit, "passed": check.passed}
            for check in checks
        ],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"\nThe connector's threads: {', '.join(names)}. {options.json} holds the numbers.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

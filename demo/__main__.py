"""Two real vLLM engines share a long prefix through dfkv: sets up what is needed, measures, and prints the result."""

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.engines.http_client import HttpError
from tests.engines.process import ServerError
from tests.engines.setup_engine import EngineEnv, EngineSetupError, ensure_engine
from tests.engines.tiny_model import SMALL, ensure_model
from tests.engines.vllm_server import ROOT, SITE

from .document import QUESTIONS
from .measure import Measurement, Setup
from .report import make_console, print_table, to_json, write_json, write_picture
from .verdict import judge

LOGS = ROOT / "build" / "demo"
GIB = 1 << 30
ENGINES = 3
ENGINE_BYTES = 2 * GIB  # without weights and KV


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description=__doc__,
        epilog="Exits with 0 when every restored answer is right, 1 when one differs or nothing was restored, "
        "2 when the engines could not be run.",
    )
    parser.add_argument("--model", type=Path, help="a model on disk (default: a random one of 105 M parameters)")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompts (default 8192)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each run (default 5)")
    parser.add_argument(
        "--json", type=Path, default=Path("demo.json"), help="where the result goes (default demo.json)"
    )
    parser.add_argument("--picture", type=Path, help="also draw the medians into this SVG file")
    parser.add_argument("--kv-space-gib", type=int, help="KV cache of each engine (default: for two prompts)")
    parser.add_argument("--ram", help="memory of the cache node (default: for every prompt, twice)")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=400.0,
        help="on slow machines fewer documents are computed cold, to end in this time (default 400)",
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"{options.model} holds no config.json: give the directory of a model in Hugging Face format")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console = make_console()
    # Ended by `kill`, the engines still have to go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:5.0f} s[/]  {line}")

    def doing(line: str) -> contextlib.AbstractContextManager[object]:
        return console.status(line)

    if not (SITE / "dfkv_connectors").is_dir():
        console.print(f"[red]error:[/] {SITE} is missing: run `make build`, or `make demo`, which does")
        return 2
    try:
        with doing("looking for the engine"):
            engine = ensure_engine("vllm_cpu", say)
        model = options.model.resolve() if options.model else None
        if model is None:
            with doing("making the model"):
                model = ensure_model(engine.python, SMALL)
        setup = plan(options, engine, model)
        _introduce(say, setup)
        _warn_of_memory(console, setup)
        results = Measurement(setup, say, doing).run()
    except (EngineSetupError, ServerError, HttpError, OSError, ValueError) as error:
        console.print(f"[red]error:[/] {type(error).__name__}: ", end="")
        console.print(str(error), markup=False)
        return 2
    verdict = judge(results, options.repeats)
    print_table(console, verdict, results)
    seconds = time.monotonic() - start
    about = {
        "model": str(model),
        "tokens": options.tokens,
        "seconds": round(seconds, 1),
        "install_seconds": round(engine.installed_s, 1),
        "cpus": len(os.sched_getaffinity(0)),
    }
    write_json(options.json, to_json(verdict, results, about))
    console.print(f"\n{options.json} holds every sample; logs are in {LOGS}. All of it took {seconds:.0f} s.")
    if options.picture:
        write_picture(options.picture, verdict)
        console.print(f"{options.picture} shows the medians.")
    return 1 if verdict.faults else 0


def plan(options: argparse.Namespace, engine: EngineEnv, model: Path) -> Setup:
    """Sizes for what the model's KV needs."""
    prompt_bytes = options.tokens * kv_bytes_per_token(json.loads((model / "config.json").read_text()))
    return Setup(
        engine,
        model,
        LOGS,
        tokens=options.tokens,
        repeats=options.repeats,
        kv_space_gib=options.kv_space_gib or max(1, math.ceil(2.2 * prompt_bytes / GIB)),
        ram=options.ram or f"{max(2, math.ceil(2 * options.repeats * prompt_bytes / GIB))}GiB",
        budget_s=options.budget_s,
    )


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Of a transformer with attention in every layer, in bfloat16; other models need less."""
    heads = config["num_attention_heads"]
    head_bytes = 2 * int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_bytes


def _introduce(say: Callable[[str], None], setup: Setup) -> None:
    say(f"vLLM in {setup.engine.path}")
    say(f"model {setup.model}")
    say(f"prompts: {setup.tokens:,} tokens of licences and documentation, with one of two questions at the end:")
    for question in QUESTIONS:
        say(f"  {question.strip().splitlines()[0]!r}")


def _warn_of_memory(console: Console, setup: Setup) -> None:
    weights = sum(path.stat().st_size for path in setup.model.glob("*.safetensors"))
    wanted = ENGINES * (ENGINE_BYTES + weights + setup.kv_space_gib * GIB)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            if available < wanted:
                console.print(
                    f"[yellow]warning:[/] {available / GIB:.1f} GiB of memory are free, three engines may want {wanted / GIB:.1f}"
                )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

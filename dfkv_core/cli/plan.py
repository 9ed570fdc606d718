"""`dfkv plan`: what would the cache be worth for this traffic?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfkv_core.cli.output import CommandError, JsonOption, print_json, print_table

if TYPE_CHECKING:
    from dfkv_core.plan.economics import Costs
    from dfkv_core.plan.study import Capacity, ClusterReport, Row, Step
    from dfkv_core.plan.trace import Progress as ReadProgress
    from dfkv_core.plan.trace import RequestTrace

DEFAULT_CAPACITIES = "1%,5%,10%,25%,50%"
_ALL = "all"
_COSTS = "What a hit is worth"
_NODES = "Several nodes"
_ASKED_WRONGLY = 2


def plan(
    trace: Annotated[Path, typer.Argument(help="Requests as JSON lines with hash_ids, plain or gzipped.")],
    capacity: Annotated[
        str,
        typer.Option(
            "--capacity", "-c", metavar="LIST", help="Percents of the different blocks, sizes (500GiB), or blocks."
        ),
    ] = DEFAULT_CAPACITIES,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", metavar="LIST", help="Eviction policies, or all (default: the store's own)."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block of the trace.")] = 512,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hits against capacity into a .png or .svg file.")
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(min=1e-9, help="Prefill speed of one engine.", rich_help_panel=_COSTS)
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one engine.", rich_help_panel=_COSTS)] = 1,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Size of one token's KV, all layers together.", rich_help_panel=_COSTS)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Take that size from a model's config.json.", rich_help_panel=_COSTS),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="KV type, with --model: auto, bfloat16, fp8...", rich_help_panel=_COSTS)
    ] = "auto",
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Between an engine and the cache, a second.", rich_help_panel=_COSTS),
    ] = None,
    drive_writes_per_day: Annotated[
        float, typer.Option(min=1e-9, help="Capacities a day that the drives may be written.", rich_help_panel=_COSTS)
    ] = 1.0,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Share the largest capacity among nodes.", rich_help_panel=_NODES),
    ] = None,
    unlimited: Annotated[
        bool, typer.Option("--unlimited", help="Give the nodes room for everything instead.", rich_help_panel=_NODES)
    ] = False,
    run_blocks: Annotated[
        int, typer.Option(min=1, help="Keep runs of so many blocks on one node.", rich_help_panel=_NODES)
    ] = 1,
    spread_blocks: Annotated[
        int, typer.Option(min=0, help="Leading blocks that are in no run.", rich_help_panel=_NODES)
    ] = 0,
    copy_after_reads: Annotated[
        int, typer.Option(min=0, help="Copy a block to a second node after so many reads.", rich_help_panel=_NODES)
    ] = 0,
    copy_share: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of a node that copies may take.", rich_help_panel=_NODES)
    ] = 0.1,
    example: Annotated[
        int | None,
        typer.Option("--example", min=1, metavar="REQUESTS", help="First write a made-up trace to TRACE."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the made-up trace.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace and say what a cache would be worth for it.

    Hits against capacity, and from a few measured numbers: prefill time
    and GPU-hours saved, bandwidth needed, wear of drives, the loss of a
    node. It says so when the cache is not worth it.

    \b
    Examples:
      dfkv plan trace.jsonl
      dfkv plan trace.jsonl.gz --policy all --capacity 1%,10%,50% --json
      dfkv plan trace.jsonl --model /models/llama --prefill-tokens-per-s 12000
          --bandwidth 10GiB --capacity 500GiB,2TiB --plot hits.png
      dfkv plan trace.jsonl --nodes 8
      dfkv plan made-up.jsonl --example 20000
    """
    from dfkv_core.plan.economics import Costs
    from dfkv_core.plan.study import Placement, losses_of, replay_all, replay_nodes, replays_of
    from dfkv_core.plan.trace import TraceError, read_trace

    costs = Costs(
        block_tokens=block_tokens,
        kv_bytes_per_token=_kv_bytes(kv_bytes_per_token, model, kv_dtype),
        prefill_tokens_per_s=prefill_tokens_per_s,
        gpus_per_engine=gpus,
        bandwidth_bytes_per_s=_bandwidth(bandwidth),
        drive_writes_per_day=drive_writes_per_day,
    )
    policies = _policies(policy)
    if plot is not None:
        _check_plot(plot)
    if example is not None:
        _write_example(trace, example, seed)
    with _progress() as bars:
        try:
            requests = read_trace(trace, bars.reading())
        except TraceError as error:
            raise CommandError(str(error), "`dfkv plan --example 1000 FILE` writes one that is right") from None
        except OSError as error:
            raise CommandError(f"cannot read {trace}: {error.strerror or error}") from None
        capacities = _capacities(capacity, requests.native.unique_blocks, costs.block_bytes)
        steps = bars.steps("replaying", replays_of(policies, capacities))
        rows = replay_all(requests, policies, capacities, costs, steps)
        cluster = None
        if nodes is not None:
            placement = Placement(nodes, run_blocks, spread_blocks, copy_after_reads, copy_share)
            room = None if unlimited else max(one.blocks for one in capacities)
            steps = bars.steps("losing nodes", 1 + len(losses_of(nodes)))
            cluster = _guarded(lambda: replay_nodes(requests, _usable(policies), room, placement, steps))
    if plot is not None:
        from dfkv_core.plan.plot import draw

        draw(rows, plot, f"{trace.name}: {requests.requests:,} requests")
    if as_json:
        print_json(_document(requests, rows, cluster, costs))
    else:
        _print(requests, rows, cluster, costs)


def _guarded(run: Any) -> Any:
    try:
        return run()
    except ValueError as error:
        raise CommandError(str(error), exit_code=_ASKED_WRONGLY) from None


# ---- what was asked for


def _kv_bytes(given: int | None, model: Path | None, kv_dtype: str) -> int | None:
    if model is None:
        return given
    from dfkv_core.plan.model import ModelConfigError, read_kv_bytes_per_token

    if given is not None:
        raise CommandError(
            "--kv-bytes-per-token and --model were both given", "give one of them", exit_code=_ASKED_WRONGLY
        )
    try:
        return read_kv_bytes_per_token(model, kv_dtype)
    except ModelConfigError as error:
        raise CommandError(str(error), "or give --kv-bytes-per-token", exit_code=_ASKED_WRONGLY) from None
    except OSError as error:
        raise CommandError(f"cannot read {model}: {error.strerror or error}", exit_code=_ASKED_WRONGLY) from None


def _bandwidth(text: str | None) -> float | None:
    if text is None:
        return None
    from dfkv_core.config_values import parse_size

    try:
        found = float(parse_size(text.strip().removesuffix("/s")))
    except ValueError as error:
        raise CommandError(f"--bandwidth: expected {error}, found {text!r}", exit_code=_ASKED_WRONGLY) from None
    if found <= 0:
        raise CommandError("--bandwidth: expected more than 0", exit_code=_ASKED_WRONGLY)
    return found


def _policies(text: str | None) -> list[str]:
    from dfkv_core import _native

    known = _native.replay_policies()
    if text is None:
        return [_native.DEFAULT_EVICTION_POLICY]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if _ALL in names:
        return [name for name in known if name != "unbounded"]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CommandError(
            f"--policy: there is no policy {', '.join(map(repr, unknown)) or repr(text)}",
            f"choose from {', '.join(known)}, or {_ALL}",
            exit_code=_ASKED_WRONGLY,
        )
    return names


def _usable(policies: Sequence[str]) -> str:
    """The store's own policy, or else the first that a store could have."""
    from dfkv_core import _native

    if _native.DEFAULT_EVICTION_POLICY in policies:
        return _native.DEFAULT_EVICTION_POLICY
    known = _native.eviction_policies()
    return next((policy for policy in policies if policy in known), _native.DEFAULT_EVICTION_POLICY)


def _capacities(text: str, unique_blocks: int, block_bytes: int | None) -> list[Capacity]:
    """In the order given, each once."""
    found: dict[int, Capacity] = {}
    for part in (one.strip() for one in text.split(",")):
        capacity = _capacity(part, unique_blocks, block_bytes)
        if capacity.blocks < 1:
            raise CommandError(
                f"--capacity: {part} is less than one block; the trace has {unique_blocks:,} different ones",
                exit_code=_ASKED_WRONGLY,
            )
        found.setdefault(capacity.blocks, capacity)
    return list(found.values())


def _capacity(text: str, unique_blocks: int, block_bytes: int | None) -> Capacity:
    from dfkv_core.config_values import parse_size
    from dfkv_core.plan.study import Capacity

    expected = 'a percent ("10%"), a size ("500GiB") or a number of blocks'
    try:
        if text.endswith("%"):
            percent = Decimal(text[:-1].strip())
            return Capacity(int(percent * unique_blocks / 100), float(percent))
        blocks = int(text) if text.isdecimal() else None
        size_bytes = int(parse_size(text))
    except (ValueError, ArithmeticError):
        raise CommandError(f"--capacity: expected {expected}, found {text!r}", exit_code=_ASKED_WRONGLY) from None
    if blocks is None and block_bytes is None:
        raise CommandError(
            f"--capacity: {text} cannot be turned into blocks without the size of one",
            "give --kv-bytes-per-token or --model",
            exit_code=_ASKED_WRONGLY,
        )
    if blocks is None:
        blocks = size_bytes // (block_bytes or 1)
    return Capacity(blocks, 100 * blocks / unique_blocks)


def _check_plot(path: Path) -> None:
    from dfkv_core.plan.plot import PlotError, check

    try:
        check(path)
    except PlotError as error:
        raise CommandError(str(error), exit_code=_ASKED_WRONGLY) from None


def _write_example(path: Path, requests: int, seed: int) -> None:
    from dfkv_core.plan.synthetic import write

    if path.exists():
        raise CommandError(f"{path} exists", "an example is only written to a new file", exit_code=_ASKED_WRONGLY)
    try:
        write(path, requests, seed)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None


# ---- progress


class _Bars:
    def __init__(self, progress: Any) -> None:
        self._progress = progress

    def reading(self) -> ReadProgress:
        task = self._progress.add_task("reading", total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def steps(self, name: str, total: int) -> Step:
        task = self._progress.add_task(name, total=total)
        return lambda: self._progress.advance(task)


@contextmanager
def _progress() -> Iterator[_Bars]:
    """On standard error; lines of text where that is no terminal would only be in the way."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield _Bars(progress)


# ---- what was found


def _sentences(rows: Sequence[Row], costs: Costs, cluster: ClusterReport | None) -> list[str]:
    from dfkv_core.plan.verdict import verdict

    replayed = [row.policy for row in rows]
    chosen = _usable(replayed)
    if chosen not in replayed:
        chosen = replayed[0]
    return verdict([*(row for row in rows[:-1] if row.policy == chosen), rows[-1]], costs, cluster)


def _document(trace: RequestTrace, rows: Sequence[Row], cluster: ClusterReport | None, costs: Costs) -> dict[str, Any]:
    return {
        "trace": {
            "path": str(trace.path),
            "requests": trace.requests,
            "blocks": trace.native.blocks,
            "unique_blocks": trace.native.unique_blocks,
            "conflicting_blocks": trace.native.conflicts,
            "prompt_tokens": trace.prompt_tokens(costs.block_tokens),
            "output_tokens": trace.output_tokens,
            "duration_s": trace.duration_s,
        },
        "costs": asdict(costs),
        "rows": [
            {
                "policy": row.policy,
                "capacity_blocks": row.capacity_blocks,
                "capacity_pct": row.capacity_pct,
                "hit_ratio": row.hit_ratio,
                **asdict(row.worth),
            }
            for row in rows
        ],
        "cluster": None if cluster is None else asdict(cluster),
        "verdict": _sentences(rows, costs, cluster),
    }


def _print(trace: RequestTrace, rows: Sequence[Row], cluster: ClusterReport | None, costs: Costs) -> None:
    from dfkv_core.plan.report import cluster_lines, hit_table, trace_line, worth_table

    print(trace_line(trace, costs))
    if trace.native.conflicts:
        print(
            f"warning: {trace.native.conflicts:,} blocks follow different blocks in different requests: these ids do not "
            "stand for whole prefixes, and the hits below are wrong",
            file=sys.stderr,
        )
    print()
    print_table("", *hit_table(rows), right=range(1, 99))
    table = worth_table(rows, costs)
    if table is not None:
        print()
        print_table("", *table, right=range(2, 99))
    if cluster is not None:
        print()
        print_table("", (f"{cluster.nodes} nodes", "", ""), cluster_lines(cluster), right=(1,))
    print()
    for sentence in _sentences(rows, costs, cluster):
        print(sentence)

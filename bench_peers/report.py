"""The result for people (a table and bars), for programs (JSON) and for the documentation (a page and a picture)."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench_peers.measure import RUN_S, Report, Row

PAGE = "benchmarks.md"
PICTURE = "img/peers.png"
PAGE_COLUMNS = 140
OPS = ("put", "get")
COLOURS = {"dfkv": "#2a7de1", "Mooncake": "#e07b39", "memcached": "#8c8c8c", "redis": "#c4c4c4"}
# What dfkv is meant to reach: the store it is compared with, the size, the least ratio.
BARS = (
    ("Mooncake", 256 << 10, 1.6),
    ("Mooncake", 1 << 20, 2.0),
    ("Mooncake", 4 << 20, 2.0),
    ("memcached", 1 << 20, 0.85),
)


@dataclass(frozen=True)
class Bar:
    what: str
    measured: float
    least: float

    @property
    def met(self) -> bool:
        return self.measured >= self.least


def bars(report: Report) -> list[Bar]:
    """Those whose store and size were measured."""
    found = []
    for store, size_bytes, least in BARS:
        for row in report.rows:
            if (row.store, row.size_bytes) == (store, size_bytes):
                found.append(Bar(f"{row.op} of {_size(size_bytes)}, dfkv over {store}", row.ratio, least))
    return found


def print_report(console: Console, report: Report) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("op")
    table.add_column("size", justify="right")
    table.add_column("store")
    for name in ("GB/s", "min - max", "dfkv is"):
        table.add_column(name, justify="right")
    for row in _in_order(report):
        spread = f"{row.low_gb_per_s:.2f} - {row.high_gb_per_s:.2f}"
        ratio = "" if row.store == "dfkv" else f"{row.ratio:.2f} x"
        table.add_row(row.op, _size(row.size_bytes), row.store, f"{row.gb_per_s:.2f}", spread, ratio)
    console.print(table)
    console.print(f"\nMedians of {report.rows[0].repeats} turns; batches of {report.rows[0].batch} objects.")
    for line in report.missing:
        console.print(f"[yellow]left out[/]: {line}", highlight=False)
    for bar in bars(report):
        mark = "[green]met[/]" if bar.met else "[red]missed[/]"
        console.print(f"  {mark}  {bar.what}: {bar.measured:.2f}, at least {bar.least:.2f}", highlight=False)


def write_json(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**asdict(report), "host": host(), "bars": [{**asdict(bar), "met": bar.met} for bar in bars(report)]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_page(docs: Path, report: Report) -> None:
    """docs/benchmarks.md and its picture."""
    batch, repeats = report.rows[0].batch, report.rows[0].repeats
    lines = ["# Benchmarks", ""]
    lines += _filled(
        "dfkv beside other stores, in one run on one machine, over TCP on loopback: one server process, one client process, "
        f"batches of {batch} objects. `make bench-peers` measures it on yours, and with `DOCS=1` it writes this page. What is not "
        "installed is left out: Mooncake is fetched into an environment of its own, memcached and redis are the programs that the "
        "machine has."
    )
    lines += ["", f"![dfkv and its peers]({PICTURE})", ""]
    lines += ["| op | size | store | GB/s | min - max | dfkv is |", "| --- | ---: | --- | ---: | ---: | ---: |"]
    for row in _in_order(report):
        ratio = "" if row.store == "dfkv" else f"{row.ratio:.2f} x"
        spread = f"{row.low_gb_per_s:.2f} - {row.high_gb_per_s:.2f}"
        lines.append(f"| {row.op} | {_size(row.size_bytes)} | {row.store} | {row.gb_per_s:.2f} | {spread} | {ratio} |")
    lines.append("")
    lines += _filled(
        f"Medians of {repeats} turns of at least {RUN_S} s each; the stores take turns, and each is first about equally often. "
        '"dfkv is" is the median of the ratios within a turn. Every byte that was read is compared with what was written.'
    )
    lines += ["", "| store | version | how |", "| --- | --- | --- |"]
    lines += [f"| {name} | {version} | {report.hows[name]} |" for name, version in report.versions.items()]
    lines += ["", f"Host: {host()}.", "", "What to keep in mind:", ""]
    for note in _NOTES:
        lines += _filled(note, bullet=True)
    lines += [
        "",
        "`dfkv bench` measures dfkv alone, next to what plain TCP streams and a copy in memory give on the machine.",
        "",
    ]
    (docs / PAGE).write_text("\n".join(lines))
    _draw(docs / PICTURE, report)


_NOTES = (
    (
        "dfkv and memcached have memory for three batches and evict while they are written to. In Mooncake, whose puts fail until its "
        "evicting thread has run, and in redis, which would evict some of the batch itself, what is no longer wanted is removed between "
        "the puts, which is not measured."
    ),
    "dfkv makes and compares a checksum of every object on both sides. The others make none.",
    (
        "memcached and redis are driven without a client library: two connections with a thread each, one system call for the requests "
        "of a connection and one for its answers, from and into the same memory. No client of theirs gives more."
    ),
    "All of it shares the machine's cores: what a server uses its client lacks. Across a network the figures are others.",
)


def _filled(text: str, *, bullet: bool = False) -> list[str]:
    first, later = ("- ", "  ") if bullet else ("", "")
    return textwrap.wrap(text, PAGE_COLUMNS, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def host() -> str:
    model = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB, Linux {kernel}, Python {platform.python_version()}"


def _draw(path: Path, report: Report) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row.size_bytes for row in report.rows})
    stores = [name for name in COLOURS if name in report.versions]
    figure, axes = pyplot.subplots(1, len(OPS), figsize=(9, 3.4), sharey=True)
    width = 0.8 / len(stores)
    for plot, op in zip(axes, OPS, strict=True):
        for number, store in enumerate(stores):
            rows = {row.size_bytes: row for row in report.rows if (row.store, row.op) == (store, op)}
            there = [(place, rows[size]) for place, size in enumerate(sizes) if size in rows]
            heights = [row.gb_per_s for _, row in there]
            spread = [
                [row.gb_per_s - row.low_gb_per_s for _, row in there],
                [row.high_gb_per_s - row.gb_per_s for _, row in there],
            ]
            places = [place + (number - (len(stores) - 1) / 2) * width for place, _ in there]
            plot.bar(places, heights, width * 0.92, yerr=spread, label=store, color=COLOURS[store], ecolor="#444444")
        plot.set_title(op)
        plot.set_xticks(range(len(sizes)), [_size(size) for size in sizes])
        plot.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GB/s, median; whiskers: all turns")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _in_order(report: Report) -> list[Row]:
    order = list(report.versions)
    return sorted(report.rows, key=lambda row: (OPS.index(row.op), row.size_bytes, order.index(row.store)))


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"

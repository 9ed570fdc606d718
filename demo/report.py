"""The result for people (a table), for programs (JSON) and for the README (a picture)."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from .measure import COLD, LOCAL, RESTARTED, RESTORED, SAVING, Results
from .verdict import Row, Verdict

_COLOURS = {COLD: "#8c8c8c", SAVING: "#8c8c8c", RESTORED: "#2a7de1", RESTARTED: "#2a7de1", LOCAL: "#3aa655"}


def make_console() -> Console:
    """For a terminal as wide as it is; for a log file wide enough for the tables."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=120)


def print_table(console: Console, verdict: Verdict, results: Results) -> None:
    table = Table(
        title="time to first token", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    table.add_column("run", no_wrap=True)
    for name in ("TTFT s", "min - max s", "n", "prompt tokens", "restored tokens", "MB moved", "GB/s"):
        table.add_column(name, justify="right")
    for row in verdict.rows:
        table.add_row(
            row.run,
            f"{row.ttft_s:.3f}",
            f"{row.ttft_min_s:.2f} - {row.ttft_max_s:.2f}",
            str(row.repeats),
            f"{row.prompt_tokens:,}",
            f"{row.restored_tokens:,}" if row.restored_tokens else "-",
            f"{row.bytes / 1e6:.1f}" if row.bytes else "-",
            f"{row.gb_per_s:.2f}" if row.gb_per_s else "-",
        )
    console.print()
    console.print(table)
    console.print(
        f"\nTTFT: medians. Prompts of a repetition share {results.shared_tokens:,} tokens; engines restore whole chunks and "
        "compute the rest.\nMB moved: saved while prefilling cold, loaded when restoring.\n"
    )
    if any(row.repeats < len(results.of(RESTORED)) for row in verdict.rows):
        console.print("This machine is slow: fewer documents were computed cold, to end in time (see --budget-s).\n")
    for bar in verdict.bars:
        mark = "[green]met[/]" if bar.met else "[red]missed[/]"
        console.print(f"  {mark}  {bar.what}: {bar.measured:.3f} {bar.unit}, at most {bar.limit:.3f} {bar.unit}")
    console.print()
    _print_answers(console, results)
    if verdict.faults:
        console.print("[bold red]The answers are not proven right:[/]")
        for fault in verdict.faults:
            console.print(f"  - {fault}", markup=False)
    else:
        console.print(
            f"[bold green]The restored answers are right[/]: {verdict.identical_positions} tokens equal those after a local "
            f"prefix hit, and all {verdict.clear_positions} tokens that a cold run decides clearly equal its own."
        )


def _print_answers(console: Console, results: Results) -> None:
    """The first repetition's answers to the same prompt, as token ids: what is compared."""
    console.print("  The answers to the same prompt, as token ids (first repetition):")
    for run in (COLD, RESTORED, RESTARTED, LOCAL):
        if sample := results.at(run, 0):
            console.print(f"    {run:<28} {' '.join(str(token) for token in sample.answer.token_ids)}")
    console.print()


def to_json(verdict: Verdict, results: Results, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": [row.to_json() for row in verdict.rows],
        "outputs_identical": verdict.outputs_identical,
        "faults": verdict.faults,
        "compared": {"with_local_hit": verdict.identical_positions, "with_cold": verdict.clear_positions},
        "bars": [
            {"what": bar.what, "measured": round(bar.measured, 4), "limit": round(bar.limit, 4), "met": bar.met}
            for bar in verdict.bars
        ],
        "samples": [
            {
                "run": sample.run,
                "repeat": sample.repeat,
                "document": sample.document,
                "ttft_s": round(sample.answer.ttft_s, 4),
                "total_s": round(sample.answer.total_s, 4),
                "cached_tokens": sample.answer.cached_tokens,
                "restored_tokens": sample.traffic.restored_tokens,
                "bytes": sample.moved_bytes,
                "token_ids": sample.answer.token_ids,
            }
            for sample in results.samples
        ],
        "engine_start_s": {name: round(seconds, 1) for name, seconds in results.starts_s.items()},
        "idle_cpus": {name: round(share, 3) for name, share in results.idle_cpus.items()},
        **about,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(path: Path, verdict: Verdict) -> None:
    """Bars of the medians as an SVG file: no plotting library needed, and a text that can be compared."""
    label, full, height = 190, 470, 30
    longest = max(row.ttft_s for row in verdict.rows)
    width, total = label + full + 90, 44 + height * len(verdict.rows)
    size = f'viewBox="0 0 {width} {total}" width="{width}" height="{total}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="10" y="22" font-weight="600">{escape(_title(verdict.rows))}</text>',
    ]
    for index, row in enumerate(verdict.rows):
        top = 36 + index * height
        bar = max(1.5, full * row.ttft_s / longest)
        lines += [
            f'<text x="{label - 8}" y="{top + 17}" text-anchor="end">{escape(row.run)}</text>',
            f'<rect x="{label}" y="{top + 4}" width="{bar:.1f}" height="18" rx="2" fill="{_COLOURS[row.run]}"/>',
            f'<text x="{label + bar + 6:.1f}" y="{top + 17}">{row.ttft_s:.2f} s</text>',
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]))


def _title(rows: list[Row]) -> str:
    return f"Time to first token, prompt of {rows[0].prompt_tokens:,} tokens"

"""Hit ratio against capacity as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dfkv_core.plan.study import Row

SUFFIXES = (".png", ".svg")


class PlotError(RuntimeError):
    """No picture can be made. The message says what to do."""


def check(path: Path) -> None:
    """Before any work: can a picture of this name be made here? Raises PlotError."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"a plot is a .png or .svg file, found {path.name!r}")
    if not path.parent.is_dir():
        raise PlotError(f"there is no folder {path.parent} to put the plot in")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("plots need matplotlib: pip install 'dfkv[plot]'") from None


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """One line for each policy; a dashed one for the unbounded cache. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows if row.policy != "unbounded"):
        line = sorted((row.capacity_pct, 100 * row.hit_ratio) for row in rows if row.policy == policy)
        style = "--" if policy == "belady" else "-"
        axes.plot([x for x, _ in line], [y for _, y in line], style, marker="o", markersize=4, label=policy)
    for row in rows:
        if row.policy == "unbounded":
            axes.axhline(100 * row.hit_ratio, color="grey", linestyle=":", label="unbounded")
    axes.set_xscale("log")
    ticks = sorted({row.capacity_pct for row in rows if row.policy != "unbounded"})
    axes.set_xticks(ticks, [_tick(rows, tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, % of the different blocks")
    axes.set_ylabel("blocks that are hits, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _tick(rows: Sequence[Row], capacity_pct: float) -> str:
    from dfkv_core.config_values import format_size

    text = f"{capacity_pct:.3g}"
    for row in rows:
        if row.capacity_pct == capacity_pct and row.worth.capacity_bytes is not None:
            return f"{text}\n{format_size(row.worth.capacity_bytes)}"
    return text

"""Draws the time to first token of a demo's run: python -m demo.picture [demo.json] [docs/img/ttft.svg]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLD, RESTORED, LOCAL = "#b3b3b3", "#2b7bba", "#6aa84f"


def draw(rows: list[dict[str, Any]], into: Path) -> None:
    """A bar for each row, as long as its median; `into` ends with the picture's kind (svg, png)."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures make the same file, with text as text.
    matplotlib.rcParams |= {"svg.hashsalt": "dfkv", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.6))
    names = [row["run"] for row in rows]
    medians = [row["ttft_s"] for row in rows]
    colours = [COLD if "cold" in name else RESTORED if "restored" in name else LOCAL for name in names]
    bars = axes.barh(names, medians, color=colours)
    axes.bar_label(bars, [f"{median:.2f} s" for median in medians], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(medians) * 1.12)
    axes.set_xlabel("time to first token, seconds (median)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(into, metadata={"Date": None})


def main(arguments: list[str]) -> int:
    source, into = [*arguments, *("demo.json", "docs/img/ttft.svg")[len(arguments) :]][:2]
    draw(json.loads(Path(source).read_text(encoding="utf-8"))["rows"], Path(into))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""dfkv beside Mooncake's store, memcached and redis, in one run.

usage: python -m bench_peers [--sizes-kib N ...] [--batch N] [--repeats N] [--docs]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bench_peers.measure import measure
from bench_peers.report import print_report, write_json, write_page
from bench_peers.store import StoreFailedError

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "build" / "bench-peers" / "result.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--docs", action="store_true", help="also write docs/benchmarks.md and its picture")
    arguments = parser.parse_args()
    console = Console()
    try:
        with console.status("starting") as status:
            tell = status.update if console.is_terminal else lambda line: None
            report = measure([n << 10 for n in arguments.sizes_kib], arguments.batch, arguments.repeats, tell)
    except StoreFailedError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 1
    print_report(console, report)
    write_json(RESULT, report)
    console.print(f"\n{RESULT.relative_to(ROOT)}", highlight=False)
    if arguments.docs:
        write_page(ROOT / "docs", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Many random histories on every core: python -m tests.simulation [--histories N] [--first SEED]

Names the seed of each history that breaks an invariant, and exits with 1 when there is one. --trace SEED tells one of them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.checks import InvariantError
from tests.simulation.history import History

BATCH = 250


def run(first: int, count: int) -> tuple[int, list[str]]:
    """(views published, what went wrong) of the histories first..first + count - 1."""
    views, failures = 0, []
    for seed in range(first, first + count):
        history = History(seed)
        try:
            history.run()
        except InvariantError as error:
            failures.append(str(error))
        views += history.checks.views
    return views, failures


def trace(seed: int) -> int:
    """What happens in the history of one seed, event by event."""
    history = History(seed)
    history.world.tracing = True
    try:
        history.run()
    except InvariantError as error:
        print(error)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=random.SystemRandom().randrange(1 << 40))
    parser.add_argument("--trace", type=int, metavar="SEED")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        return trace(arguments.trace)
    last = arguments.first + arguments.histories
    starts = range(arguments.first, last, BATCH)
    counts = [min(BATCH, last - start) for start in starts]
    views, failures = 0, []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found_views, found in pool.map(run, starts, counts):
            views += found_views
            failures += found
    for failure in failures[:20]:
        print(failure)
    print(f"{arguments.histories} histories from seed {arguments.first}, {views} views, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

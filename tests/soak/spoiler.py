"""A wire that spoils some answers of one node, in a process of its own. Prints its port; takes the node's port on its input.

usage: python -m tests.soak.spoiler SEED
"""

from __future__ import annotations

import sys

from tests.integration.fault_proxy import FaultProxy, Odds

ODDS = Odds(spoil_object=0.03, pause=0.02, longest_pause_s=0.05)


def main(arguments: list[str]) -> int:
    proxy = FaultProxy(int(arguments[0]), ODDS)
    print(proxy.port, flush=True)
    proxy.node_port = int(sys.stdin.readline())
    sys.stdin.readline()
    proxy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

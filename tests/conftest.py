"""Options and the closing report of every test run: how long each share took."""

from __future__ import annotations

import os
from collections import defaultdict

import hypothesis
import pytest

# Clients keep their last view there; what one test has seen is nothing to the next.
os.environ["XDG_STATE_HOME"] = "/dev/null/state"

_SHARES = ("build + lint", "unit + integration", "cluster", "native asan + ubsan", "native tsan", "engines")
_seconds: dict[str, float] = defaultdict(float)
_share_of: dict[str, str] = {}

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("torture", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prepared-seconds", type=float, default=0.0, help="seconds already spent on build and lint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        _share_of[item.nodeid] = _share(item)


def _share(item: pytest.Item) -> str:
    if item.get_closest_marker("engine"):
        return "engines"
    if item.get_closest_marker("native"):
        return "native tsan" if "tsan" in item.nodeid else "native asan + ubsan"
    cluster = "test_mds" in item.nodeid or "test_simulation" in item.nodeid
    return "cluster" if cluster else "unit + integration"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[_share_of.get(report.nodeid, "unit + integration")] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    _seconds["build + lint"] += config.getoption("--prepared-seconds")
    terminalreporter.section("seconds per share")
    for share in _SHARES:
        if _seconds[share]:
            terminalreporter.write_line(f"{share:<22}{_seconds[share]:8.1f} s")
    terminalreporter.write_line(f"{'all':<22}{sum(_seconds.values()):8.1f} s on {os.cpu_count()} cores")

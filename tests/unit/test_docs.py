"""The pages made from the code are what the code makes, and links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize(
    ("name", "make"), [("configuration.md", docs.configuration_page), ("metrics.md", docs.metrics_page)]
)
def test_generated_page_is_current(name: str, make: object) -> None:
    assert callable(make)
    assert (docs.DOCS / name).read_text(encoding="utf-8") == make(), "run `make docs` and commit the result"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

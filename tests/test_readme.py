"""What the README and the pages of docs/ show, done as it stands in a folder of a newcomer's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import ROOT, links, replay

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
named = pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)


def test_readme_runs(tmp_path: Path) -> None:
    printed = replay(README, tmp_path)
    assert len(printed) >= 11
    for name in ("model.py", "plan.json", "metrics.jsonl", "profile.json"):
        assert (tmp_path / name).is_file()
    plan, loop = (out for text, out in printed.items() if "import autopar" in text)
    assert float(plan.splitlines()[-1]) > 0
    losses = [float(line.split()[1]) for line in loop.splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    replay(page, tmp_path)


@named
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_readme_names_every_page() -> None:
    assert {(ROOT / target).resolve() for target in links(README)} >= set(PAGES)

"""The page holds the estimate's numbers, asks nothing of the network, and fits a desktop and a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.files import check_ending
from autopar.report import page
from autopar.report.html import report
from autopar.report.language import Language
from autopar.report.plots.timeline import timeline
from autopar.units import format_bytes, format_seconds
from tests.cli.command import refuse
from tests.report.subjects import pipelined, replicated

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Tags in balance, attributes and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


@pytest.fixture(scope="module")
def text() -> str:
    return report(pipelined())


def test_the_numbers_are_those_of_the_estimate(text: str) -> None:
    estimate, shown = pipelined().estimate, Reader(text).words
    assert format_seconds(estimate.step_time_s) in shown
    assert format_bytes(estimate.peak_reserved) in shown
    assert f"{estimate.mfu:.1%}" in shown
    for rank in range(2):
        assert format_bytes(estimate.stages[rank].reserved) in shown
    for seconds in estimate.breakdown.values():
        assert not seconds or format_seconds(seconds) in shown
    source = pipelined().cluster.device.sources[0]
    assert any(source in words for words in shown)


def test_it_is_whole_and_asks_nothing_of_the_network(text: str) -> None:
    found = Reader(text)
    assert found.open == []
    tags = {tag for tag, _, _ in found.attributes}
    assert not tags & {"script", "link", "iframe", "object"}
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = [v for _, name, v in found.attributes if name in ("href", "xlink:href", "src")]
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert "@import" not in text
    assert [tag for tag, name, _ in found.attributes if (tag, name) == ("svg", "role")] == ["svg"] * 6


def test_names_are_escaped() -> None:
    about = pipelined()
    model = about.plan.model.model_copy(update={"source": "/home/me/<b>&.py"})
    text = report(replace(about, plan=about.plan.model_copy(update={"model": model})))
    assert "&lt;b&gt;&amp;.py" in text
    assert "/home/me" not in text
    assert Reader(text).open == []


def test_a_plan_that_does_not_fit_is_marked() -> None:
    about = replicated()
    text = report(replace(about, estimate=replace(about.estimate, memory_limit=1)))
    assert re.search(r'class="warning">It does NOT fit', text)


def test_in_chinese() -> None:
    words = " ".join(Reader(report(pipelined(), Language("zh"))).words)
    assert "流水线气泡" in words
    names = set(re.findall(r"[A-Za-z]{4,}", words))
    assert not names - KEPT, names - KEPT


KEPT = {
    "shard",
    "node",
    "blocks",
    "embed",
    "head",
    "tokens",
    "autopar",
    "NVIDIA",
    "data",
    "sheet",
    "full",
    "Gbit",
    "ZeRO",
}


def test_a_large_figure_goes_in_as_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "LARGEST_SVG", 10)
    text = page.plot(timeline(pipelined()), "timeline")
    assert "<svg" not in text
    assert 'src="data:image/png;base64,iVBOR' in text


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_page_is_wider_than_its_window(width: int, language: str, tmp_path: Path) -> None:
    # in a frame, because windows cannot be as narrow as a phone
    widths_of = "[innerWidth, root.clientWidth, root.scrollWidth].join(' ')"
    ask = f"const root = document.documentElement; parent.document.body.dataset.widths = {widths_of}"
    shown = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report(pipelined(), Language(language)))
    framed = escape(shown.replace("</body>", f"<script>{ask}</script></body>"))
    (tmp_path / "page.html").write_text(
        f'<body><iframe style="border:0;width:{width}px;height:900px" srcdoc="{framed}"></iframe></body>', "utf-8"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000"]
    command = [str(CHROMIUM), *flags, "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    widths = re.search(r'data-widths="(\d+) (\d+) (\d+)"', done.stdout)
    assert widths, done.stderr
    frame, inside, page_width = map(int, widths.groups())
    assert frame == width
    assert page_width <= inside


def test_bad_targets(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in '.txt'"):
        check_ending(tmp_path / "a.txt", ".html")
    with pytest.raises(InputError, match="does not exist"):
        check_ending(tmp_path / "none" / "a.html", ".html")


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    replicated().plan.save(tmp_path / "plan.json")
    assert "report has nothing to write" in refuse("report", str(tmp_path / "plan.json"))

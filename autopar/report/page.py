"""Page: the pieces of a self-contained HTML document; no scripts, nothing from the network."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

CSS = Path(__file__).parents[1] / "data" / "report.css"
LARGEST_SVG = 1_000_000  # characters; what is larger is slow to draw and goes in as a picture
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, language: str, body: Iterable[str]) -> str:
    """A whole page; its policy forbids browsers to load anything."""
    code = "zh-Hans" if language == "zh" else "en"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>\n{CSS.read_text()}</style>"
    )
    inside = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="{code}"><head>{head}</head>\n<body>\n{inside}\n</body></html>\n'


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Numbers in large type, each with its name below."""
    items = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts)
    return f'<div class="cards">{"".join(items)}</div>'


def bullets(sentences: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(sentence.strip())}</li>' for sentence in sentences)}</ul>"


def table(shown: Table) -> str:
    """A table of the terminal, with its alignment."""
    sides = ["right" if column.justify == "right" else "" for column in shown.columns]
    heads = "".join(_cell("th", side, str(c.header)) for side, c in zip(sides, shown.columns, strict=True))
    rows = zip(*(column.cells for column in shown.columns), strict=True)
    lines = ("".join(_cell("td", side, str(cell)) for side, cell in zip(sides, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(tag: str, side: str, text: str) -> str:
    return f'<{tag} class="{side}">{escape(text)}</{tag}>' if side else f"<{tag}>{escape(text)}</{tag}>"


def plot(drawn: Figure, name: str, tall: bool = False) -> str:
    """A figure inside the page.

    Args:
        name: one word, different for every plot of a page; also what a screen reader says.
        tall: higher than wide; not stretched to the width of the page.
    """
    text = _svg(drawn, name)
    if len(text) > LARGEST_SVG:
        text = _png(drawn, name)
    return f'<figure class="wide{" tall" if tall else ""}">{text}</figure>'


def _svg(drawn: Figure, name: str) -> str:
    """The ``<svg>`` element; its ids carry the plot's name, for ids must differ within a page."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)


def _png(drawn: Figure, name: str) -> str:
    file = io.BytesIO()
    drawn.savefig(file, format="png", dpi=150)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'

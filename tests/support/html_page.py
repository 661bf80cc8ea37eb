"""A page as a test sees it: its elements, attributes and texts, and that every element is closed in order."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements, their attributes and texts, with a check that every one is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def require_inside_frames(text: str) -> int:
    """Every drawing of a page is well-formed and keeps its shapes and words inside its frame; how many there are."""
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for found in drawings:
        svg = ElementTree.fromstring(found)
        width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
        for shape in svg.iter(f"{SVG}rect"):
            x, y = float(shape.attrib["x"]), float(shape.attrib["y"])
            assert x >= 0 and x + float(shape.attrib["width"]) <= width + 0.1
            assert y >= 0 and y + float(shape.attrib["height"]) <= height + 0.1
        for dot in svg.iter(f"{SVG}circle"):
            assert 0 <= float(dot.attrib["cx"]) <= width and 0 <= float(dot.attrib["cy"]) <= height
        for words in svg.iter(f"{SVG}text"):
            # DejaVu Sans, the widest fallback, is about 0.6 em a character
            length = 0.6 * float(words.attrib["font-size"]) * len(words.text or "")
            left = {"start": 0.0, "middle": length / 2, "end": length}[words.attrib["text-anchor"]]
            x = float(words.attrib["x"]) - left
            assert x >= -2 and x + length <= width + 2, words.text
            assert 5 <= float(words.attrib["y"]) <= height, words.text
    return len(drawings)

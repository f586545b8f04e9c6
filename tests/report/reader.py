"""Parse an HTML page into its elements, and into the text that a screen reader reads aloud."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "wbr", "hr", "input", "link"}
BEFORE = {"span": " ", "th": " | ", "td": " | ", **dict.fromkeys(("b", "strong", "code", "wbr"), "")}
"""Element -> the separator that its start adds to the line. Every other element begins a new line."""


class Page(HTMLParser):
    """A page's elements with their attributes, and its text outside <style>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.style = ""
        self.open: list[str] = []
        self.wrong: list[str] = []
        self._heard = ""
        self._hidden = 0
        """Number of open elements that a screen reader skips: the outermost hidden element and those inside it."""
        self.feed(html)

    @property
    def heard(self) -> str:
        """Return texts and labels, one line per block, row or label."""
        lines = (re.sub(r"\s+", " ", line).strip(" |") for line in self._heard.split("\0"))
        return "".join(f"{line}\n" for line in lines if line)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.elements.append((tag, attributes))
        self._heard += BEFORE.get(tag, "\0")
        if tag in VOID:
            return
        self.open.append(tag)
        if self._hidden or attributes.get("aria-hidden") == "true" or tag == "style":
            self._hidden += 1
        elif label := attributes.get("aria-label"):
            self._heard += f"[{label}]\0"
            self._hidden += attributes.get("role") == "img"  # the label replaces the picture's content

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)
        self._hidden -= self._hidden > 0
        self._heard += "" if tag in BEFORE else "\0"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
            return
        self.text += data
        if not self._hidden:
            self._heard += data.replace("\n", "\0") if self.open[-1:] == ["pre"] else data

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and set(kind.split()) <= set(attributes.get("class", "").split())
        ]

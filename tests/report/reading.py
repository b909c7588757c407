"""A page taken apart by the standard library's parser."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "input", "br", "hr", "img"}


@dataclass
class Page(HTMLParser):
    """Its elements, texts by element, and addresses."""

    tags: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    text: str = ""
    _open: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open[-1] == tag, f"</{tag}> closes <{self._open[-1]}>"
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def data(self) -> Any:
        """What the script is given."""
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[0])))


def read_page(html: str) -> Page:
    """The page; every element that it opens is closed."""
    page = Page()
    page.feed(html)
    page.close()
    assert page._open == []
    return page

"""Pictures of memory over time: self-contained, with every layer, the budget, and its numbers."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from npusim.errors import MissingPackageError
from npusim.report.html import write_html
from npusim.report.panels import COLORS, Panel, layers_of, steps
from npusim.report.png import write_png
from npusim.report.timeline import Sample

GIB = 1 << 30
PANEL = Panel(
    title="skip <1>",
    memory=[
        Sample(0.0, {"weights": 20 * GIB, "KV cache, free": 30 * GIB}),
        Sample(1.5, {"weights": 20 * GIB, "KV cache, in use": 10 * GIB, "KV cache, free": 20 * GIB, "new": GIB}),
        Sample(2.0, {"weights": 20 * GIB, "KV cache, free": 30 * GIB}),
    ],
    load=[Sample(0.0, {"running": 3, "waiting": 1}), Sample(2.0, {})],
    end=4.0,
    capacity_bytes=64 * GIB,
    budget_bytes=58 * GIB,
)


class Page(HTMLParser):
    """Elements of a page with their attributes, and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append((self.elements[-1][0] if self.elements else "", data))


def test_html_needs_nothing_else_and_has_every_layer(tmp_path):
    path = tmp_path / "memory.html"
    write_html(path, "a & b", [PANEL, PANEL])
    text = path.read_text()
    page = Page(text)
    assert not re.search(r"https?://|src=|@import|<link", text)
    polygons = [attributes for tag, attributes in page.elements if tag == "polygon"]
    assert len(polygons) == 2 * len(layers_of([PANEL]))
    assert {polygon["fill"] for polygon in polygons} == {COLORS["weights"], "#56b4e9", "#cceeff", "#ffffff"}
    assert "budget 58.00 GiB" in text
    assert "running (at most 3)" in text
    assert "skip &lt;1&gt;" in text
    data = json.loads(next(data for tag, data in page.texts if tag == "script" and data.startswith("{")))
    assert data["times"] == [0.0, 1.5, 2.0, 4.0]
    assert data["values"][data["layers"].index("new")] == [0, GIB, 0, 0]


def test_layers_have_the_order_of_their_colours_and_unknown_ones_come_last():
    assert layers_of([PANEL]) == ["weights", "KV cache, in use", "KV cache, free", "new"]
    assert len(set(COLORS.values())) == len(COLORS)


def test_steps_keep_each_value_until_the_next():
    times, (running,) = steps(PANEL.load, ["running"], PANEL.end)
    assert (times, running) == ([0.0, 2.0, 4.0], [3, 0, 0])
    assert steps([], ["running"], 4.0) == ([0.0, 4.0], [[0, 0]])


def test_png_is_drawn_and_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.png", "two.png"):
        write_png(tmp_path / name, "title", [PANEL], dpi=40)
    first = (tmp_path / "one.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "two.png").read_bytes()


def test_png_without_matplotlib_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'npusim-xlite-runner\[plot\]'; a file name that ends"):
        write_png(tmp_path / "x.png", "title", [PANEL])

"""Memory over time as one HTML file that needs nothing else: pictures in SVG, and a readout under the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from npusim.report.panels import COLORS, GIB, LOAD_COLORS, UNKNOWN_COLOR, Panel, layers_of, steps

_WIDTH, _MEMORY_HEIGHT, _LOAD_HEIGHT = 560, 340, 90
_LEFT, _TOP, _GAP, _BOTTOM = 46, 8, 18, 34

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }}
h1 {{ font-size: 1.2em }} h2 {{ font-size: 1em; margin: 0 0 .3em }}
.panels {{ display: flex; flex-wrap: wrap; gap: 1.5em }}
svg text {{ font-size: 11px; fill: #222; paint-order: stroke; stroke: #fffb; stroke-width: 3px }}
.readout {{ font-variant-numeric: tabular-nums; white-space: pre-wrap; min-height: 3em; max-width: 600px }}
.legend span {{ display: inline-block; margin-right: 1.2em }}
.legend i {{ display: inline-block; width: .9em; height: .9em; margin-right: .4em; border: 1px solid #666 }}
</style></head><body><h1>{title}</h1><div class="panels">{panels}</div><p class="legend">{legend}</p>
<p>Each step shows the most that was held in it. Dashed: the budget of the process. Solid: the memory of the device.</p>
<script>{script}</script></body></html>
"""

_SCRIPT: Final = """
document.querySelectorAll("figure").forEach(function (figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), line = svg.querySelector(".pointer");
  const readout = figure.querySelector(".readout");
  function last(times, time) {
    let low = 0, high = times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (times[middle] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }
  svg.addEventListener("pointermove", function (event) {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const time = data.end * Math.min(Math.max((x - data.left) / data.width, 0), 1);
    const at = data.left + data.width * time / data.end;
    line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible");
    const memory = last(data.times, time), load = last(data.load_times, time);
    const parts = data.layers.map((name, row) => [name, data.values[row][memory]]).filter(part => part[1]);
    const total = parts.reduce((sum, part) => sum + part[1], 0);
    readout.textContent = time.toFixed(3) + " s: " + (total / 2 ** 30).toFixed(2) + " GiB in use; "
      + data.states.map((name, row) => data.load[row][load] + " " + name).join(", ") + "\\n"
      + parts.reverse().map(part => part[0] + " " + (part[1] / 2 ** 30).toFixed(3)).join(", ") + " (GiB)";
  });
});
"""


def write_html(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw panels, each the memory above the load.

    Raises:
        OSError: The file cannot be written.
    """
    layers = layers_of(panels)
    swatches = [(layer, COLORS.get(layer, UNKNOWN_COLOR)) for layer in reversed(layers)]
    legend = "".join(f'<span><i style="background:{color}"></i>{escape(layer)}</span>' for layer, color in swatches)
    drawn = "".join(_figure(panel, layers) for panel in panels)
    page = _PAGE.format(title=escape(title), panels=drawn, legend=legend, script=_SCRIPT)
    path.write_text(page, encoding="utf-8")


def _figure(panel: Panel, layers: Sequence[str]) -> str:
    times, values = steps(panel.memory, layers, panel.end)
    states = list(LOAD_COLORS)
    load_times, load = steps(panel.load, states, panel.end)
    end = max(times[-1], load_times[-1]) or 1.0
    data = {
        "left": _LEFT, "width": _WIDTH, "end": end, "layers": layers, "times": times, "values": values,
        "states": states, "load_times": load_times, "load": load,
    }  # fmt: skip
    height = _TOP + _MEMORY_HEIGHT + _GAP + _LOAD_HEIGHT + _BOTTOM
    memory = _memory(panel, layers, times, values, end)
    requests = _load(states, load_times, load, end)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure><h2>{escape(panel.title)}</h2>"
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" width="{_LEFT + _WIDTH + 10}" role="img" '
        f'aria-label="{escape(panel.title)}">{memory}{requests}'
        f'<line class="pointer" y1="{_TOP}" y2="{height - _BOTTOM}" stroke="black" visibility="hidden"/></svg>'
        f'<div class="readout"></div><script type="application/json">{text}</script></figure>'
    )


def _memory(
    panel: Panel, layers: Sequence[str], times: Sequence[float], values: Sequence[Sequence[int]], end: float
) -> str:
    scale = _Scale(end, panel.capacity_bytes / GIB * 1.02, _TOP, _MEMORY_HEIGHT)
    parts = [scale.axis("GiB")]
    below = [0.0] * len(times)
    for layer, row in zip(layers, values, strict=True):
        above = [base + num_bytes / GIB for base, num_bytes in zip(below, row, strict=True)]
        outline = [*scale.steps(times, above), *reversed(scale.steps(times, below))]
        parts.append(
            f'<polygon points="{" ".join(outline)}" fill="{COLORS.get(layer, UNKNOWN_COLOR)}" stroke="white" '
            f'stroke-width="0.3"><title>{escape(layer)}</title></polygon>'
        )
        below = above
    for num_bytes, dashes, text in ((panel.budget_bytes, "6 4", "budget"), (panel.capacity_bytes, "none", "device")):
        y = scale.y(num_bytes / GIB)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" '
            f'stroke-dasharray="{dashes}"/><text x="{_LEFT + _WIDTH - 4}" y="{y + 12:.1f}" text-anchor="end">'
            f"{text} {num_bytes / GIB:.2f} GiB</text>"
        )
    return "".join(parts)


def _load(states: Sequence[str], times: Sequence[float], load: Sequence[Sequence[int]], end: float) -> str:
    top = _TOP + _MEMORY_HEIGHT + _GAP
    scale = _Scale(end, max(1, *(max(row) for row in load)), top, _LOAD_HEIGHT)
    parts = [scale.axis("requests"), scale.times()]
    for index, (state, row) in enumerate(zip(states, load, strict=True)):
        color = LOAD_COLORS[state]
        points = " ".join(scale.steps(times, row))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            f'<text x="{_LEFT + _WIDTH - 4}" y="{top + 12 + 13 * index}" text-anchor="end" style="fill:{color}">'
            f"{state} (at most {max(row)})</text>"
        )
    return "".join(parts)


class _Scale:
    """From seconds and a quantity to places in the picture."""

    def __init__(self, end: float, most: float, top: float, height: float) -> None:
        self._end, self._most, self._top, self._height = end, most, top, height

    def x(self, time: float) -> float:
        return _LEFT + _WIDTH * time / self._end

    def y(self, value: float) -> float:
        return self._top + self._height * (1 - value / self._most)

    def steps(self, times: Sequence[float], values: Sequence[float]) -> list[str]:
        """Corners of a line that keeps each value until the next time."""
        corners = []
        for index, (time, value) in enumerate(zip(times, values, strict=True)):
            if index:
                corners.append(f"{self.x(time):.1f},{self.y(values[index - 1]):.1f}")
            corners.append(f"{self.x(time):.1f},{self.y(value):.1f}")
        return corners

    def axis(self, unit: str) -> str:
        """Numbers and lines of the vertical axis."""
        parts = []
        for value in _ticks(self._most):
            y = self.y(value)
            parts.append(
                f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>'
                f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
            )
        middle = self._top + self._height / 2
        turn = f"rotate(-90 12 {middle:.0f})"
        return "".join(parts) + f'<text x="12" y="{middle:.0f}" transform="{turn}" text-anchor="middle">{unit}</text>'

    def times(self) -> str:
        """Numbers of the horizontal axis."""
        y = self._top + self._height
        ticks = "".join(
            f'<text x="{self.x(value):.1f}" y="{y + 14}" text-anchor="middle">{value:g}</text>'
            for value in _ticks(self._end)
        )
        return f'{ticks}<text x="{_LEFT + _WIDTH / 2}" y="{y + 28}" text-anchor="middle">virtual time (s)</text>'


def _ticks(most: float) -> list[float]:
    """Zero and up to six round numbers."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(index * step, 9) for index in range(int(most / step) + 1)]

"""Memory over time as a PNG, drawn with matplotlib (the extra ``plot``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npusim.errors import MissingPackageError
from npusim.report.panels import COLORS, GIB, LOAD_COLORS, UNKNOWN_COLOR, Panel, layers_of, steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELLED_SHARE = 0.04
"""Layers that are at least this share of the device halfway have their size then written into them."""


def import_figure() -> type[Figure]:
    """The class of matplotlib's figures.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "a PNG is drawn with matplotlib, which is not installed: pip install 'npusim-xlite-runner[plot]'; "
            "a file name that ends in .html needs nothing"
        ) from None
    return Figure


def write_png(path: Path, title: str, panels: Sequence[Panel], *, dpi: int = 120) -> None:
    """Draw panels side by side, each the memory above the load.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure = import_figure()(figsize=(1.6 + 4.6 * len(panels), 5.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes: Any = figure.subplots(
        2, len(panels), sharex="col", sharey="row", squeeze=False, gridspec_kw={"height_ratios": [4, 1]}
    )
    layers = layers_of(panels)
    for column, panel in enumerate(panels):
        _draw_memory(axes[0][column], panel, layers)
        _draw_load(axes[1][column], panel)
    axes[0][0].set_ylabel("memory of the device (GiB)")
    axes[1][0].set_ylabel("requests")
    _legend(figure, layers, len(panels))
    figure.savefig(path, dpi=dpi, format="png", metadata={"Software": None})


def _draw_memory(axes: Axes, panel: Panel, layers: Sequence[str]) -> None:
    times, values = steps(panel.memory, layers, panel.end)
    heights = [[num_bytes / GIB for num_bytes in row] for row in values]
    colors = [COLORS.get(layer, UNKNOWN_COLOR) for layer in layers]
    axes.stackplot(times, *heights, colors=colors, step="post", linewidth=0.4, edgecolor="white")
    capacity, budget = panel.capacity_bytes / GIB, panel.budget_bytes / GIB
    axes.axhline(budget, color="black", linewidth=1.2, linestyle="--")
    axes.axhline(capacity, color="black", linewidth=0.8)
    axes.annotate(
        f"budget {budget:.2f} GiB", (0.99, budget), xycoords=("axes fraction", "data"), xytext=(0, -2),
        textcoords="offset points", ha="right", va="top", fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    axes.set_title(panel.title, fontsize=9.5)
    axes.set_xlim(times[0], times[-1] or 1)
    axes.set_ylim(0, capacity * 1.02)
    middle = bisect_right(times, (times[0] + times[-1]) / 2) - 1
    bottom = 0.0
    for layer, row in zip(layers, heights, strict=True):
        height = row[middle]
        if height >= _LABELLED_SHARE * capacity:
            axes.text(
                0.5, bottom + height / 2, f"{layer} {height:.2f} GiB", transform=axes.get_yaxis_transform(),
                ha="center", va="center", fontsize=8, color="black",
                bbox={"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        bottom += height


def _draw_load(axes: Axes, panel: Panel) -> None:
    names = list(LOAD_COLORS)
    times, values = steps(panel.load, names, panel.end)
    for name, row in zip(names, values, strict=True):
        axes.step(times, row, where="post", color=LOAD_COLORS[name], linewidth=1.2)
        axes.annotate(
            f"{name} (at most {max(row)})", (1, 1), xycoords="axes fraction", fontsize=8, ha="right", va="top",
            xytext=(-4, -4 - 11 * names.index(name)), textcoords="offset points", color=LOAD_COLORS[name],
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("virtual time (s)")


def _legend(figure: Figure, layers: Sequence[str], num_panels: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLORS.get(layer, UNKNOWN_COLOR), label=layer) for layer in reversed(layers)]
    handles.append(Line2D([], [], color="black", linestyle="--", label="budget of the process"))
    handles.append(Line2D([], [], color="black", linewidth=0.8, label="memory of the device"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4 if num_panels > 1 else 3, fontsize=8, frameon=False
    )

"""npusim: a simulated Ascend NPU on which vendor-facing code runs deterministically, without a card.

>>> import npusim
>>> world = npusim.SimWorld("a3-64g")
>>> with world:
...     import torch
...     x = torch.empty(1024, device="npu")
...     torch.npu.memory_allocated()
4608
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npusim.installation import install, uninstall
    from npusim.world import SimWorld

__version__ = "0.1.0"
__all__ = ["SimWorld", "install", "uninstall"]

_HOMES = {"SimWorld": "npusim.world", "install": "npusim.installation", "uninstall": "npusim.installation"}


def __getattr__(name: str) -> Any:
    # Lazy, since these import torch, which takes seconds.
    if name in _HOMES:
        import importlib
        import sys

        if "torch" not in sys.modules:  # which would load a real torch_npu, unless it finds the double under that name
            from npusim.installation import expose_doubles

            expose_doubles()

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Put a world behind device ``npu``: the one composition root of the double."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from npusim.errors import WorldError

if TYPE_CHECKING:
    from npusim.torch_backend.runtime import Platform

P = TypeVar("P", bound="Platform")
VENDOR_PATH = str(Path(__file__).parent / "vendor")


def expose_doubles() -> None:
    """Let ``import torch_npu`` and ``import xlite`` find the doubles; importing them registers device ``npu``."""
    if VENDOR_PATH not in sys.path:
        sys.path.insert(0, VENDOR_PATH)


def is_double(file: str | None) -> bool:
    """Whether a vendor module's file is the double's."""
    return file is not None and Path(file).resolve().is_relative_to(Path(VENDOR_PATH).resolve())


def install(world: P) -> P:
    """Make ``torch_npu``, ``xlite`` and device ``npu`` mean this world, until :func:`uninstall`.

    Returns:
        The world.

    Raises:
        WorldError: Another world is active, or the real torch_npu was imported into this process.
    """
    expose_doubles()
    import torch_npu  # registers device npu

    if not is_double(torch_npu.__file__):
        raise WorldError(
            f"the real torch_npu ({torch_npu.__file__}) was imported into this process, maybe by torch itself; the "
            "simulated and the real one never share a process. Import npusim.SimWorld before torch, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    from npusim.torch_backend import registration

    registration.activate(world)
    return world


def uninstall(world: Platform) -> None:
    """Take a world away again; its tensors that are still alive give their memory back to it when they die."""
    from npusim.torch_backend import registration

    registration.deactivate(world)

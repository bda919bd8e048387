"""The double of ``acl``, the Python interface to the driver's calls."""

from __future__ import annotations

from typing import Any

from acl import rt

from npusim.errors import UnmodelledNameError

__all__ = ["rt"]


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"acl.{name} is not modelled on the simulated device")

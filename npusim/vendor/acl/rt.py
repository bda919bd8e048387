"""The double of ``acl.rt``."""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledCallError, UnmodelledNameError


def memcpy(*arguments: Any) -> int:
    """Copy between addresses.

    Raises:
        UnmodelledCallError: Always; vendor code copies by it in sleep mode only.
    """
    raise UnmodelledCallError(f"acl.rt.memcpy{arguments} is not modelled on the simulated device")


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"acl.rt.{name} is not modelled on the simulated device")

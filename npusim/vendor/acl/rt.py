"""The double of ``acl.rt``."""

from __future__ import annotations

from typing import Any, Final

from npusim.errors import UnmodelledCallError, UnmodelledNameError
from npusim.torch_backend.registration import platform

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2


def memcpy(dst: int, dest_max: int, src: int, count: int, kind: int) -> int:
    """Copy a segment of sleep mode to a host buffer, or back; returns 0.

    The host buffer's own bytes stay as they are: the simulated device remembers what they would be.

    Raises:
        UnmodelledCallError: Another kind of copy, or one to a device from a buffer that no segment was copied to.
    """
    if kind == _DEVICE_TO_HOST:
        platform().sleep_mode.copy_to_host(dst, src, count)
    elif kind == _HOST_TO_DEVICE:
        platform().sleep_mode.copy_to_device(dst, src, count)
    else:
        call = f"acl.rt.memcpy{(dst, dest_max, src, count, kind)}"
        raise UnmodelledCallError(f"{call} is not modelled on the simulated device; kind must be 1 or 2")
    return 0


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"acl.rt.{name} is not modelled on the simulated device")

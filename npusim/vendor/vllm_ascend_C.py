"""The double of ``vllm_ascend.vllm_ascend_C``, vllm-ascend's compiled extension: its functions for sleep mode.

The operators of ``torch.ops._C_ascend`` are defined with the other operators; those that nobody modelled raise when
called. ``NPUPluggableAllocator(None, "my_malloc", "my_free")`` finds the extension's C functions: its file is none that
the process has mapped, so that vllm-ascend knows no path to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npusim.errors import UnmodelledNameError
from npusim.torch_backend.registration import platform
from npusim.torch_backend.sleep_mode import Handle

__all__ = ["init_module", "python_create_and_map", "python_unmap_and_release"]


def init_module(python_malloc: Callable[[Handle], object], python_free: Callable[[int], Handle]) -> None:
    """Take the callables that hear of segments; see :meth:`npusim.torch_backend.sleep_mode.SleepModeMemory.init`."""
    platform().sleep_mode.init(python_malloc, python_free)


def python_create_and_map(device: int, size: int, address: int, handle: int) -> None:
    """Put new memory behind a segment's addresses.

    Raises:
        OutOfHbmError: The device is full.
    """
    platform().sleep_mode.create_and_map(device, size, address, handle)


def python_unmap_and_release(device: int, size: int, address: int, handle: int) -> None:
    """Give the memory behind a segment's addresses back to the device."""
    platform().sleep_mode.unmap_and_release(device, size, address, handle)


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"vllm_ascend.vllm_ascend_C.{name} is not modelled on the simulated device")

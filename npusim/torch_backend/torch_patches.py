"""Where torch gives a backend in Python no hook: functions of torch that are replaced, once per process.

Each replacement does as torch does unless device ``npu`` is meant. Storages, pinned memory and generators have modules
of their own: :mod:`~npusim.torch_backend.untyped_storage`, :mod:`~npusim.torch_backend.host_memory`,
:mod:`~npusim.torch_backend.generators`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, overrides
from torch.utils import _device

from npusim.errors import WorldError
from npusim.torch_backend import generators, host_memory, untyped_storage
from npusim.torch_backend.registration import has_platform, platform
from npusim.torch_backend.tensors import is_simulated

ACCELERATOR_FUNCTIONS = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "current_stream": "current_stream",
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}
"""Functions of ``torch.accelerator`` that would ask torch's C++ side, and those of ``torch.npu`` that do the same."""


def patch(npu_module: ModuleType) -> None:
    """Replace what has to be replaced.

    Args:
        npu_module: ``torch.npu``.
    """
    _device._device_constructors()  # remembers the functions that a default device applies to, before they are wrapped
    untyped_storage.patch()
    host_memory.patch()
    generators.patch()
    for name, function in ACCELERATOR_FUNCTIONS.items():
        setattr(torch.accelerator, name, _of_its_own(getattr(npu_module, function)))
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _on_current_device(getattr(torch, name), follows_default=True))
    for name in ("to", "new_tensor"):
        setattr(Tensor, name, _on_current_device(getattr(Tensor, name), follows_default=False))
    torch._tensor_str._str_intern = _without_unknown_values(torch._tensor_str._str_intern)


def _of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same: torch.compile wants ``torch.accelerator``'s to be no other backend's, too."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def with_index(device: Any) -> Any:
    """Device ``npu`` without an index becomes the calling rank's current device; anything else stays as it is."""
    if isinstance(device, str):
        if device != "npu":
            return device
    elif not isinstance(device, torch.device) or device.index is not None or device.type != "npu":
        return device
    return torch.device("npu", platform().current_device())


def _on_current_device(function: Callable[..., Any], *, follows_default: bool) -> Callable[..., Any]:
    """The C++ side asks the device guard which device is current, and a guard in Python cannot say."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not has_platform():
            return function(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = with_index(device)
        elif follows_default and torch._C._len_torch_function_stack():
            kwargs["device"] = with_index(_default_device())
        return function(*[with_index(argument) for argument in args], **kwargs)

    return wrapper


def _default_device() -> torch.device | None:
    """What ``torch.set_default_device`` or ``with torch.device(...)`` said, as it was said."""
    for mode in reversed(overrides._get_current_function_mode_stack()):
        if isinstance(mode, _device.DeviceContext):
            device: torch.device = mode.device
            return device
    return None


def _without_unknown_values(original: Callable[..., str]) -> Callable[..., str]:
    """Printing a tensor must not read what nobody computed."""

    @wraps(original)
    def wrapper(tensor: Tensor, *, tensor_contents: str | None = None) -> str:
        if tensor_contents is None and is_simulated(tensor):
            tensor_contents = _instead_of_values(tensor)
        return original(tensor, tensor_contents=tensor_contents)

    return wrapper


def _instead_of_values(tensor: Tensor) -> str | None:
    try:
        if platform().values.known([tensor]):
            return None
        reason = "<values not computed>"
    except WorldError:
        reason = "<of a world that is not active>"
    return f"{reason}, size={tuple(tensor.shape)}"

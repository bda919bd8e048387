"""New tensors on simulated devices, and copies to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime, device_index
from npusim.torch_backend.storage import contiguous_stride


def new_on(runtime: DeviceRuntime, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous, uninitialised tensor on a device; its memory is allocated now."""
    size = tuple(size)
    num_bytes = dtype.itemsize
    for extent in size:
        num_bytes *= extent
    return platform().storages.new_tensor(runtime, num_bytes, dtype, size, contiguous_stride(size))


def new_like(tensor: torch.Tensor, size: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous, uninitialised tensor where ``tensor`` is, of its size and dtype unless given.

    Raises:
        RuntimeError: A negative size, in torch_npu's words.
    """
    if size is None:
        size = tensor.shape
    elif size and min(size) < 0:
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(size)}: {list(size)}\n"
            "[ERROR] ERR01003 OPS invalid value"
        )
    index = tensor.device.index
    if index is None:  # a host tensor among the inputs of an operator that takes them
        return torch.empty(tuple(size), dtype=dtype or tensor.dtype, device="cpu")
    return new_on(platform().runtimes[index], size, dtype or tensor.dtype)


def runtime_of(device: torch.device | None) -> DeviceRuntime:
    """The runtime that a ``device`` argument means."""
    active = platform()
    return active.runtimes[device_index(active, device)]


def is_simulated(value: object) -> bool:
    """Whether a value is a tensor on a simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def simulated_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """The simulated tensors among arguments, those in lists included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "npu":
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(simulated_in(value))
    return found


def lowered(value: Any, hosts: Any) -> Any:
    """``value`` with each simulated tensor replaced by the next one of the iterator ``hosts``."""
    if isinstance(value, torch.Tensor):
        return next(hosts) if value.device.type == "npu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(lowered(item, hosts) for item in value)
    return value

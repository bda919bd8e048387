"""Pinned host memory: plain host memory that remembers having been asked for as pinned.

torch would ask the backend's C++ side for an allocator. Copies of the simulated device need no pinned memory, so what
remains is to answer ``is_pinned`` right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from npusim.torch_backend.registration import kernel
from npusim.torch_backend.vendor_errors import vendor_error

FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
"""Functions of torch that take ``pin_memory``."""
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Methods of tensors that do."""
HEEDLESS = frozenset(("arange", "eye", "linspace", "ones", "randperm", "tensor", "zeros"))
"""Of these, what torch_npu makes on a device without looking at ``pin_memory``; the others refuse. Exact: recorded on
torch_npu 2.13.0. Upstream's drafter asks for pinned zeros on its device."""

_MARK = "_npusim_is_pinned"


def patch() -> None:
    """Let the factories make pinned memory."""
    for name in FACTORIES:
        setattr(torch, name, _pinning(getattr(torch, name)))
    for name in METHODS:
        setattr(Tensor, name, _pinning(getattr(Tensor, name)))


def _pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def wrapper(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = factory(*args, **kwargs)
        if pin_memory:
            if tensor.device.type != "cpu":
                if factory.__name__ in HEEDLESS:
                    return tensor
                raise vendor_error(
                    RuntimeError, "Only dense CPU tensors can be pinned", "ERR01007 OPS feature not supported"
                )
            setattr(tensor.untyped_storage(), _MARK, True)
        return tensor

    return wrapper


@kernel("aten", "is_pinned", dispatch_key="CPU")
def is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    """``Tensor.is_pinned``."""
    del device
    return hasattr(tensor.untyped_storage(), _MARK)


@kernel("aten", "_pin_memory", dispatch_key="CPU")
def pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """``Tensor.pin_memory`` where the memory is not pinned yet: a copy."""
    del device
    pinned = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor)


@kernel("aten", "is_pinned")
def device_is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    """``Tensor.is_pinned`` of device memory: never."""
    del tensor, device
    return False


@kernel("aten", "_pin_memory")
def pin_device_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """``Tensor.pin_memory`` of device memory.

    Raises:
        RuntimeError: Always, as in torch_npu.
    """
    del device
    raise vendor_error(
        RuntimeError,
        f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned",
        "ERR00002 PTA invalid type",
    )

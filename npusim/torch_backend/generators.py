"""``torch.Generator(device="npu")``: torch would ask the backend's C++ side for one.

A host generator of torch stands behind it, which C++ code can pass on: each draw of a device operator takes a number
from it as its key. So what is drawn depends on its seed and on earlier draws, as it must.
"""

from __future__ import annotations

from typing import Any

import torch

_Generator = torch._C.Generator


class _GeneratorMeta(type(_Generator)):  # type: ignore[misc]  # torch's metaclass has no stub
    """Every generator of torch is an instance, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class Generator(_Generator, metaclass=_GeneratorMeta):
    """``torch.Generator``, for device ``npu``, too."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """As ``torch.Generator(device)``."""
        named = torch.device(device)
        if named.type != "npu":
            return _Generator(named)
        generator = super().__new__(cls)
        generator._device = named
        return generator

    _device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device; without an index if it was made without one."""
        return self._device


def patch() -> None:
    """Let ``torch.Generator`` make generators of device ``npu``."""
    torch.Generator = Generator  # type: ignore[misc]


def draw_key(generator: torch.Generator) -> tuple[int, int]:
    """The (seed, offset) of one draw from a generator of its own; the next one gets another."""
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu")), 0

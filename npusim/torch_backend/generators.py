"""``torch.Generator(device="npu")``: torch would ask the backend's C++ side for one.

A host generator of torch stands behind it, which C++ code can pass on: each draw of a device operator takes a number
from it as its key. So what is drawn depends on its seed and on earlier draws, as it must.
"""

from __future__ import annotations

from typing import Any

import torch

_Generator = torch._C.Generator

DRAW_INCREMENT = 4
"""By how much a draw advances the offset. Grade: assumed (Philox gives four numbers a step)."""


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

    def get_offset(self) -> int:
        """How far it has been drawn from: :data:`DRAW_INCREMENT` for each draw."""
        twin = _Generator(device="cpu").manual_seed(self.initial_seed())
        state, num_draws = self.get_state(), 0
        while not torch.equal(twin.get_state(), state):
            _next_key(twin)
            num_draws += 1
        return DRAW_INCREMENT * num_draws

    def set_offset(self, offset: int) -> Generator:
        """Go back or forth to after ``offset / DRAW_INCREMENT`` draws."""
        self.manual_seed(self.initial_seed())
        for _ in range(offset // DRAW_INCREMENT):
            _next_key(self)
        return self


def patch() -> None:
    """Let ``torch.Generator`` make generators of device ``npu``."""
    torch.Generator = Generator  # type: ignore[misc]


def draw_key(generator: torch.Generator) -> tuple[int, int]:
    """The (seed, offset) of one draw from a generator of its own; the next one gets another."""
    return _next_key(generator), 0


def _next_key(generator: torch.Generator) -> int:
    return int(torch.randint(1 << 62, (), generator=generator, device="cpu"))

"""The double of triton-ascend: kernels are not compiled; those that are modelled run as operators, others raise."""

from __future__ import annotations

from typing import Any

from triton import backends, language, runtime
from triton.runtime.autotuner import Config, autotune, heuristics
from triton.runtime.jit import JITFunction, jit

from npusim.errors import UnmodelledNameError

__all__ = [
    "Config",
    "JITFunction",
    "autotune",
    "backends",
    "cdiv",
    "heuristics",
    "jit",
    "language",
    "next_power_of_2",
    "runtime",
]
__version__ = "3.2.0"


def cdiv(x: int, y: int) -> int:
    """The quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"triton.{name} is not modelled on the simulated device")

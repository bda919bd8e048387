"""The double of ``triton.language``, what kernels are written in; they never run, so its functions are names only."""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledCallError


class constexpr:  # noqa: N801 - triton's name
    """A value that is known when a kernel is compiled; mostly an annotation.

    Attributes:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, constexpr) else value


class KernelOnly:
    """A name that means something inside of kernels only.

    Attributes:
        name: The name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raise: nothing but a kernel calls it."""
        del arguments, options
        raise UnmodelledCallError(f"triton.language.{self.name} was called outside of a kernel")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KernelOnly(name)


import triton.language.core  # noqa: E402 - needs what is above
import triton.language.extra.cann.libdevice  # noqa: E402
import triton.language.extra.libdevice  # noqa: E402, F401

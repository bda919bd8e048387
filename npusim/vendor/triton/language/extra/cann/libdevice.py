"""The double of ``triton.language.extra.cann.libdevice``: names for kernels."""

from __future__ import annotations

from typing import Any

from triton.language import KernelOnly


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KernelOnly(f"extra.cann.libdevice.{name}")

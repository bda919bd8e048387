"""The double of ``triton.experimental.gluon.language``: names for kernels."""

from __future__ import annotations

from typing import Any

from triton.language import KernelOnly


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KernelOnly(f"experimental.gluon.language.{name}")

"""The double of ``triton.runtime.autotuner``: choices between ways to compile a kernel have no meaning here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.jit import JITFunction


class OutOfResources(Exception):  # noqa: N818 - triton's name
    """A configuration needs more than the device has."""


class Config:
    """One way to compile a kernel."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.options = options


def autotune(configs: Sequence[Config], key: Sequence[str], **options: Any) -> Callable[[JITFunction], JITFunction]:
    """Choose among configurations; the kernel stays as it is."""
    del configs, key, options
    return lambda kernel: kernel


def heuristics(values: dict[str, Callable[..., Any]]) -> Callable[[JITFunction], JITFunction]:
    """Compute some arguments from others; modelled kernels take what they need by themselves."""
    del values
    return lambda kernel: kernel

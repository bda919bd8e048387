"""The double of ``triton.runtime.autotuner``: of several ways to compile a kernel the first is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton.runtime.jit import KernelInterface


class OutOfResources(Exception):  # noqa: N818 - triton's name
    """A configuration needs more than the device has."""


class Config:
    """One way to compile a kernel."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.options = options


class Autotuner(KernelInterface):  # type: ignore[misc]  # mypy takes triton for missing
    """A kernel with configurations to choose from.

    Args:
        fn: The kernel.
        configs: The configurations; the card takes the fastest, here it is the first, since they all compute the same.
    """

    def __init__(self, fn: Any, configs: Sequence[Config]) -> None:
        self.fn = fn
        self.configs = configs
        self.arg_names = fn.arg_names

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        """Launch the kernel in a configuration."""
        self.fn.run(*args, grid=grid, **{**(self.configs[0].kwargs if self.configs else {}), **kwargs})


class Heuristics(KernelInterface):  # type: ignore[misc]
    """A kernel of which some arguments follow from the others.

    Args:
        fn: The kernel.
        values: How each follows, by name, from all arguments that are given.
    """

    def __init__(self, fn: Any, values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        self.fn = fn
        self.values = values
        self.arg_names = fn.arg_names

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        """Launch the kernel with all its arguments."""
        for name, follows in self.values.items():
            kwargs[name] = follows({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        self.fn.run(*args, grid=grid, **kwargs)


def autotune(configs: Sequence[Config], key: Sequence[str], **options: Any) -> Callable[[Any], Autotuner]:
    """Choose among configurations."""
    del key, options
    return lambda kernel: Autotuner(kernel, configs)


def heuristics(values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Callable[[Any], Heuristics]:
    """Compute some arguments from others."""
    return lambda kernel: Heuristics(kernel, values)

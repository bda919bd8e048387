"""The double of ``triton.runtime.jit``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from npusim.ops.triton_kernels import launch


class KernelInterface:
    """What can be launched."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        """Launch it."""
        raise NotImplementedError


class JITFunction(KernelInterface):
    """A kernel, or a function that kernels call.

    Args:
        fn: Its source; never run.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__
        self.signature = signature(fn)
        self.arg_names = list(self.signature.parameters)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        """Launch it.

        Raises:
            UnmodelledCallError: Nobody modelled this kernel.
        """
        del grid
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in self.signature.parameters}
        del options  # num_warps and the like: how it is compiled
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        launch(f"{self.__module__}.{self.__qualname__}", bound.arguments)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Raise, as triton does: kernels are launched, not called."""
        del arguments, options
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a kernel of a function."""
    del options
    return JITFunction if fn is None else JITFunction(fn)

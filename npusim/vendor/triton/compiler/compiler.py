"""The double of ``triton.compiler.compiler``: kernels are not compiled."""

from __future__ import annotations

from npusim.errors import UnmodelledCallError


class CompiledKernel:
    """A compiled kernel; there are none."""

    def __init__(self) -> None:
        raise UnmodelledCallError("Triton kernels are not compiled on the simulated device")


def triton_key() -> str:
    """What identifies the compiler to caches.

    Raises:
        UnmodelledCallError: Always.
    """
    raise UnmodelledCallError("Triton kernels are not compiled on the simulated device")

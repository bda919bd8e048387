"""The double of ``triton.backends.compiler``; torch's own compiler imports it."""

from __future__ import annotations

from typing import NamedTuple


class GPUTarget(NamedTuple):
    """What kernels are compiled for."""

    backend: str
    arch: int | str
    warp_size: int

"""The double of ``triton.experimental.gluon``, another language of kernels, whose names vllm reads since 0.27."""

from __future__ import annotations

from triton.runtime.jit import jit

__all__ = ["jit"]

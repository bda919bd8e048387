"""The double of ``triton.compiler``; torch's own compiler imports it."""

from __future__ import annotations

from triton.compiler import compiler
from triton.compiler.compiler import CompiledKernel

__all__ = ["CompiledKernel", "compiler"]

"""The double of ``triton.runtime``."""

from __future__ import annotations

from triton.runtime import autotuner, jit
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["JITFunction", "autotuner", "driver", "jit"]

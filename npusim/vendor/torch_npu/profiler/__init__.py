"""The double of ``torch_npu.profiler``: profiling of operators is not modelled."""

from __future__ import annotations

from typing import Any

from torch_npu.profiler import dynamic_profile

from npusim.errors import UnmodelledNameError

__all__ = ["dynamic_profile"]


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch_npu.profiler.{name} is not modelled on the simulated device")

"""The double of ``torch_npu.profiler.dynamic_profile``: profiling that is switched on from outside."""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledNameError


def step() -> None:
    """Count a step, if ``init`` has named a folder to watch; since that is not modelled, there is nothing to do."""


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch_npu.profiler.dynamic_profile.{name} is not modelled on the simulated device")

"""The double of ``torch_npu._C``."""

from __future__ import annotations

from typing import Any

from torch_npu._C import _distributed_c10d

from npusim.errors import UnmodelledCallError, UnmodelledNameError

__all__ = ["_NPUTaskGroupHandle", "_distributed_c10d"]


class _NPUTaskGroupHandle:
    """Operators of a captured graph whose arguments can be changed; vendor code names it in annotations."""

    def __init__(self) -> None:
        raise UnmodelledCallError("task groups of captured graphs are not modelled on the simulated device")


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch_npu._C.{name} is not modelled on the simulated device")

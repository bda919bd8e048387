"""The double of ``torch_npu._C``."""

from __future__ import annotations

from typing import Any

import torch
from torch_npu._C import _distributed_c10d

from npusim.errors import UnmodelledNameError
from npusim.torch_backend.registration import platform
from npusim.torch_backend.task_groups import CapturedTask

__all__ = ["_NPUTaskGroupHandle", "_distributed_c10d", "_weak_ref_tensor"]


class _NPUTaskGroupHandle:
    """Names operators of a captured graph whose arguments can be changed."""

    def __init__(self) -> None:
        self.task = CapturedTask(0)


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without a hold on its memory."""
    return platform().storages.alias(tensor)


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch_npu._C.{name} is not modelled on the simulated device")

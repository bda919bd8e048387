"""The double of ``torch_npu``: names and signatures; what they do is in npusim."""

from __future__ import annotations

from typing import Any

import torch

from npusim.errors import UnmodelledNameError
from npusim.vendor.bindings import bind
from torch_npu import _C, npu
from torch_npu.format import Format, get_npu_format, npu_format_cast

__all__ = ["_C", "Format", "get_npu_format", "npu", "npu_format_cast"]
__version__ = "2.13.0"

bind(npu)


def __getattr__(name: str) -> Any:
    """Fused operators, as torch_npu has them: ``torch_npu.npu_x`` is ``torch.ops.npu.npu_x`` (or of ``atb``)."""
    if name.startswith(("npu_", "_npu_")):
        for namespace in (torch.ops.npu, torch.ops.atb):
            if hasattr(namespace, name):
                return getattr(namespace, name)
    raise UnmodelledNameError(f"torch_npu.{name} is not modelled on the simulated device")

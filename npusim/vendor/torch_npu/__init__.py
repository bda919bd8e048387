"""The double of ``torch_npu``: names and signatures; what they do is in npusim."""

from __future__ import annotations

from typing import Any

import torch
from torch_npu import _C, npu, op_plugin, profiler
from torch_npu.format import Format, get_npu_format, npu_format_cast

from npusim.errors import UnmodelledNameError
from npusim.vendor.bindings import bind

__all__ = ["_C", "Format", "get_npu_format", "npu", "npu_format_cast", "op_plugin", "profiler"]
__version__ = "2.13.0"

bind(npu)

# Numbers of types that torch itself does not have. Exact: op-plugin 517f2e7d, aclDataType plus 256.
hifloat8, float8_e5m2, float8_e4m3fn, float8_e8m0fnu, float4_e2m1fn_x2, float4_e1m2fn_x2 = 290, 291, 292, 293, 296, 297


def __getattr__(name: str) -> Any:
    """Fused operators, as torch_npu has them: ``torch_npu.npu_x`` is ``torch.ops.npu.npu_x`` (or of ``atb``)."""
    if name.startswith(("npu_", "_npu_")):
        for namespace in (torch.ops.npu, torch.ops.atb):
            if hasattr(namespace, name):
                return getattr(namespace, name)
    raise UnmodelledNameError(f"torch_npu.{name} is not modelled on the simulated device")

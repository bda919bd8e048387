"""The double of ``torch_npu.op_plugin.atb``."""

from __future__ import annotations

from torch_npu.op_plugin.atb import _atb_ops

__all__ = ["_atb_ops"]

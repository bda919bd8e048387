"""The double of ``torch_npu.op_plugin``."""

from __future__ import annotations

from torch_npu.op_plugin import atb

__all__ = ["atb"]

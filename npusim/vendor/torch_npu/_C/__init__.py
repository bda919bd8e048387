"""The double of ``torch_npu._C``."""

from __future__ import annotations

from torch_npu._C import _distributed_c10d

__all__ = ["_distributed_c10d"]

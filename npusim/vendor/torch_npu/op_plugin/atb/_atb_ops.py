"""The double of ``torch_npu.op_plugin.atb._atb_ops``."""

from __future__ import annotations


def _register_atb_extensions() -> None:
    """Nothing is left to do: operators of ATB are registered with torch_npu's own."""

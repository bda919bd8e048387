"""Ties the doubles to torch, once per process."""

from __future__ import annotations

from types import ModuleType


def bind(npu_module: ModuleType) -> None:
    """Register device ``npu``, its operators and the ``hccl`` backend with torch.

    Args:
        npu_module: Becomes ``torch.npu``.

    Raises:
        WorldError: The real torch_npu got there first.
    """
    from npusim import ops
    from npusim.ops import process_group
    from npusim.torch_backend import registration
    from npusim.torch_backend.fallback import fallback

    ops.declare_all()
    registration.register(npu_module, fallback)
    process_group.register_backend()

"""Ties the doubles to torch, once per process."""

from __future__ import annotations


def bind() -> None:
    """Register device ``npu``, its operators and the ``hccl`` backend with torch; ``torch.npu`` is torch_npu's.

    Raises:
        WorldError: The real torch_npu got there first.
    """
    import torch_npu  # type: ignore[import-not-found]  # the double beside this file

    from npusim import ops
    from npusim.ops import process_group
    from npusim.torch_backend import registration
    from npusim.torch_backend.fallback import fallback

    ops.declare_all()
    registration.register(torch_npu.npu, fallback)
    process_group.register_backend()

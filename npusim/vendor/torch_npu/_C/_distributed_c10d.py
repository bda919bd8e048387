"""The double of ``torch_npu._C._distributed_c10d``."""

from __future__ import annotations

from npusim.ops.distributed import HcclOptions
from npusim.ops.process_group import SimulatedProcessGroup


class ProcessGroupHCCL(SimulatedProcessGroup):
    """HCCL's process group, as vendor code names it to build options."""

    Options = HcclOptions


__all__ = ["ProcessGroupHCCL"]

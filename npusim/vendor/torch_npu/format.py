"""Memory formats of tensors."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Format(IntEnum):
    """torch_npu's memory formats and their numbers."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NC1HWC0_C04 = 12
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33
    NC = 35
    NCL = 47
    FRACTAL_NZ_C0_16 = 50
    FRACTAL_NZ_C0_32 = 51
    FRACTAL_NZ_C0_2 = 52
    FRACTAL_NZ_C0_4 = 53
    FRACTAL_NZ_C0_8 = 54


def get_npu_format(tensor: Tensor) -> Format:
    """A tensor's format."""
    return Format(torch.ops.npu.get_npu_format(tensor))


def npu_format_cast(tensor: Tensor, acl_format: int | Format) -> Tensor:
    """The tensor in another format: itself if there is nothing to do, else over new memory.

    Raises:
        UnmodelledCallError: A format other than plain ones and FRACTAL_NZ.
    """
    result: Tensor = torch.ops.npu.npu_format_cast(tensor, int(acl_format))
    return result

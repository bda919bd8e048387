"""Memory formats of tensors."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from npusim.errors import UnmodelledCallError


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
    """A tensor's format; every simulated tensor is plain (ND), since casts to other formats are not modelled."""
    del tensor
    return Format.ND


def npu_format_cast(tensor: Tensor, acl_format: int) -> Tensor:
    """Cast to a format; only ND, which a tensor has already.

    Raises:
        UnmodelledCallError: Any other format.
    """
    if acl_format != Format.ND:
        raise UnmodelledCallError(f"torch_npu.npu_format_cast to {Format(acl_format).name} is not modelled; only ND")
    return tensor

"""What torch_npu's older operators share, those that the operator library's ``acl`` interface runs."""

from __future__ import annotations

from torch import Tensor

from npusim.torch_backend.registration import platform
from npusim.torch_backend.storage import ND
from npusim.torch_backend.tensors import new_like


def copy_parts(*inputs: Tensor) -> None:
    """Copy the inputs that are not all of their storage in order, and let the copies go again."""
    copies = [new_like(tensor) for tensor in inputs if not _is_whole(tensor)]
    del copies


def _is_whole(tensor: Tensor) -> bool:
    has_blocks = platform().storages.of(tensor).npu_format != ND
    return has_blocks or (
        tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
    )

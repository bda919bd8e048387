"""Operators of torchvision that its Python part wants to find, where its compiled part cannot be loaded.

torchvision's wheels on PyPI need CUDA libraries. Upstream imports the package, but calls none of its operators.
"""


def define() -> None:
    """Define them, without kernels; torch calls this when it has been imported."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

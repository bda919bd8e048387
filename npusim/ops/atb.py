"""What all operators of the ATB library share: strided inputs are copied, strided outputs refused."""

from __future__ import annotations

from torch import Tensor

from npusim.torch_backend.tensors import new_like


def contiguous_inputs(*inputs: Tensor | None) -> list[Tensor | None]:
    """The inputs as ATB gets them: a contiguous copy in place of each strided one, to be kept until the launch."""
    return [
        tensor if tensor is None or tensor.is_cpu or tensor.is_contiguous() else new_like(tensor) for tensor in inputs
    ]


def check_outputs(*outputs: Tensor) -> None:
    """Check the tensors that ATB writes to.

    Raises:
        RuntimeError: One is strided, in torch_npu's words.
    """
    for tensor in outputs:
        if not tensor.is_contiguous():
            raise RuntimeError("at_tensor is not contiguous")

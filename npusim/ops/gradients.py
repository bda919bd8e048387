"""Gradients of operators that torch composes of others on the host, but that are one kernel on device ``npu``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npusim.torch_backend.registration import kernel


@kernel("aten", "linear_backward")
def linear_backward(
    self: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``linear`` by input, weight and bias. Grade: assumed as to memory."""
    rows, grads = self.reshape(-1, self.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])
    by_input = (grads @ weight).view(self.shape) if output_mask[0] else None
    by_weight = grads.t() @ rows if output_mask[1] else None
    by_bias = grads.sum(0) if output_mask[2] else None
    return by_input, by_weight, by_bias

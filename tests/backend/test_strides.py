"""Strides of copies, against torch's own rule on host tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from npusim.torch_backend.strides import preserved_stride


@st.composite
def views(draw):
    """A view of a small host tensor: permuted, narrowed, expanded."""
    tensor = torch.empty(draw(st.lists(st.integers(0, 4), max_size=4)))
    if tensor.dim():
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if draw(st.booleans()):
            dim = draw(st.integers(0, tensor.dim() - 1))
            tensor = tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@given(views())
def test_strides_are_those_of_empty_like(view):
    assert preserved_stride(tuple(view.shape), view.stride()) == torch.empty_like(view).stride()

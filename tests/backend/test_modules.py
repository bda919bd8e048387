"""Real mode: small networks give what torch gives on the host; gradients, as far as they go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.needs("values"),
    pytest.mark.npu_settings(values="real"),
]


class Attention(nn.Module):
    """Norm, attention with a mask, gated feed-forward network: a decoder layer in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.up_gate = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*x.shape[:-1], 4, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 2
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        up, gate = self.up_gate(x).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


MODULES = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.Softmax(-1)),
        lambda: torch.randn(5, 4),
    ),
    "embedding": (lambda: nn.Embedding(10, 4), lambda: torch.tensor([[1, 2], [9, 0]])),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_what_they_compute_on_the_host(npu_world, name):
    torch.manual_seed(0)
    make, sample = MODULES[name]
    module, x = make().eval(), sample()
    with torch.inference_mode():
        expected = module(x)
        result = copy.deepcopy(module).npu()(x.npu())
    assert result.is_npu
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result.cpu(), expected)


def test_batches_of_plain_operators(npu_world):
    torch.manual_seed(0)
    x = torch.randn(4, 6)

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        top, index = x.topk(2)
        sorted_x, order = x.sort(descending=True)
        parts = [top, index, sorted_x, order, x.cumsum(0), x.argmax(-1), torch.where(x > 0, x, -x), x.clamp(-1, 1)]
        parts += [torch.cat([x, x[:2]]), x.repeat_interleave(2, 0), x[x > 0], (x > 0).nonzero(), x[[3, 1]]]
        parts += [x.scatter(1, index, 9.0), x.gather(1, index), torch.stack([x, x]), x.flip(0), x.roll(1)]
        y = x.clone()
        y[1:3, ::2] = 0
        y.index_add_(0, torch.tensor([0, 0], device=x.device), x[:2])
        return [*parts, y, y.to(torch.int32), y.half().float()]

    for on_device, expected in zip(compute(x.npu()), compute(x), strict=True):
        torch.testing.assert_close(on_device.cpu(), expected)


def test_gradients_of_plain_operators(npu_world):
    leaf = torch.tensor([1.0, 2.0], device="npu", requires_grad=True)
    (leaf * leaf).sum().backward()
    assert leaf.grad.is_npu
    assert leaf.grad.tolist() == [2, 4]


def test_gradients_of_a_linear_layer(npu_world):
    torch.manual_seed(0)
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    (module(x) * 2).sum().backward()
    twin = copy.deepcopy(module).npu()
    twin.zero_grad()
    (twin(x.npu()) * 2).sum().backward()
    torch.testing.assert_close(twin.weight.grad.cpu(), module.weight.grad)
    torch.testing.assert_close(twin.bias.grad.cpu(), module.bias.grad)

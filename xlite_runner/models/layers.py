"""Layers whose weights are split over the tensor-parallel group, and the norm and activation between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch_npu
from torch import nn
from torch.nn import functional

from xlite_runner.config import RunnerConfig
from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.parallel_state import ParallelState

ACL_FORMAT_FRACTAL_NZ = 29

_TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def weight_nz_mode(config: RunnerConfig) -> int:
    """When weights are kept in FRACTAL_NZ: 0 never, 1 if quantised, 2 also in 16-bit floats."""
    return int(config.environment.get("VLLM_ASCEND_ENABLE_NZ", "1"))


@dataclass(frozen=True)
class BuildContext:
    """What a module needs to know to make its weights."""

    config: RunnerConfig
    parallel: ParallelState
    device: torch.device
    device_type: AscendDeviceType

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return _TORCH_DTYPES[self.config.model.dtype]

    def weight(self, *size: int) -> nn.Parameter:
        """An uninitialised weight on the device."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    def maybe_trans_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in format FRACTAL_NZ if the settings ask for it (``VLLM_ASCEND_ENABLE_NZ`` 2, or 310P)."""
        wanted = self.device_type is AscendDeviceType._310P or weight_nz_mode(self.config) == 2
        if not wanted or weight.dtype == torch.float32:
            return weight
        cast: torch.Tensor = torch_npu.npu_format_cast(weight, ACL_FORMAT_FRACTAL_NZ)
        return cast


class RMSNorm(nn.Module):
    """Root-mean-square norm, with the residual addition fused where there is one."""

    def __init__(self, hidden_size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=build.dtype, device=build.device), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``x``."""
        normed: torch.Tensor = torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        return normed

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x + residual``, and that sum, both in new tensors."""
        x, _, residual = torch.ops._C_ascend.npu_add_rms_norm_bias(
            x, residual, self.weight, None, self.variance_epsilon
        )
        return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension."""
    activated: torch.Tensor = torch_npu.npu_swiglu(gate_up)
    return activated


class LinearBase(nn.Module):
    """``x @ weight.T + bias`` with this rank's part of the weight, [output, input]."""

    def __init__(self, input_size: int, output_size: int, build: BuildContext, *, bias: bool = False) -> None:
        super().__init__()
        self.build = build
        self.weight = build.weight(output_size, input_size)
        self.bias = build.weight(output_size) if bias else None

    def process_weights_after_loading(self) -> None:
        """Put the weight into the format that the device computes with."""
        self.weight.data = self.build.maybe_trans_nz(self.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the product."""
        return functional.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank has in full."""


class QKVParallelLinear(LinearBase):
    """Query, key and value projections of this rank's heads.

    With fewer key/value heads than ranks, several ranks have the same one.
    """

    def __init__(self, build: BuildContext) -> None:
        model, parallel = build.config.model, build.config.parallel
        num_heads = model.get_num_attention_heads(parallel) + 2 * model.get_num_kv_heads(parallel)
        super().__init__(model.hidden_size, num_heads * model.head_dim, build, bias=model.attention_bias)


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input in one weight, each split by output."""

    def __init__(self, input_size: int, output_sizes: tuple[int, ...], build: BuildContext) -> None:
        super().__init__(input_size, sum(output_sizes) // build.parallel.tp.world_size, build)


class RowParallelLinear(LinearBase):
    """A linear layer split by input, its results summed over the group."""

    def __init__(self, input_size: int, output_size: int, build: BuildContext, *, bias: bool = False) -> None:
        super().__init__(input_size // build.parallel.tp.world_size, output_size, build, bias=bias)
        self.group = build.parallel.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole product, the same on every rank."""
        bias = self.bias if self.group.rank_in_group == 0 else None  # else the sum would contain it several times
        return self.group.all_reduce(functional.linear(x, self.weight, bias))


class VocabParallelEmbedding(nn.Module):
    """The token embedding, split by vocabulary, which is padded."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        model, self.group = build.config.model, build.parallel.tp
        self.org_vocab_size = model.vocab_size
        self.num_embeddings_per_partition = model.padded_vocab_size // self.group.world_size
        self.vocab_start_index = min(self.group.rank_in_group * self.num_embeddings_per_partition, model.vocab_size)
        self.vocab_end_index = min(self.vocab_start_index + self.num_embeddings_per_partition, model.vocab_size)
        self.weight = build.weight(self.num_embeddings_per_partition, model.hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of int32 token ids, the same on every rank."""
        if self.group.world_size == 1:
            return functional.embedding(input_ids.long(), self.weight)
        row_ids, foreign = self._rows_of(input_ids)
        output = functional.embedding(row_ids.long(), self.weight)
        output.masked_fill_(foreign.unsqueeze(-1), 0)
        return self.group.all_reduce(output)

    def _rows_of(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank's weight (0 for tokens of other ranks), and which tokens belong to other ranks."""
        own = (input_ids >= self.vocab_start_index) & (input_ids < self.vocab_end_index)
        offset = self.vocab_start_index * own
        row_ids = own * (input_ids - offset)
        return row_ids, ~own


class ParallelLMHead(VocabParallelEmbedding):
    """The weight of the output projection, split as the embedding is."""


class LogitsProcessor(nn.Module):
    """Logits over the whole vocabulary on every rank."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.group = build.parallel.tp
        self.org_vocab_size = build.config.model.vocab_size

    def forward(self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of each row, without the padding of the vocabulary."""
        logits = functional.linear(hidden_states, lm_head.weight)
        logits = self.group.all_gather(logits)  # this rank's part lives until the gathered one is complete
        return logits[..., : self.org_vocab_size]

"""Rotary position embeddings: the caches made at load time, and their application to queries and keys."""

from __future__ import annotations

import math

import torch
import torch_npu
from torch import nn

from xlite_runner.config import Llama3RopeScaling, ModelConfig
from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.layers import BuildContext


class RotaryEmbedding(nn.Module):
    """The embedding in torch's own operators, which upstream uses on Ascend for scaled frequencies (Llama 3.1).

    Attributes:
        cos_sin_cache: [max positions, head dim]: cosines, then sines.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        model = build.config.model
        self.head_size = model.head_dim
        positions = torch.arange(model.max_position_embeddings, dtype=torch.float32, device=build.device)
        angles = torch.outer(positions, inverse_frequencies(model, build.device))
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.register_buffer("cos_sin_cache", cache.to(build.dtype), persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedded queries and keys, [tokens, heads * head dim], in new tensors."""
        del context
        cos_sin = self.cos_sin_cache.index_select(0, positions)
        cos, sin = cos_sin.unsqueeze(-2).chunk(2, dim=-1)
        # Upstream provides for heads that are rotated in part: what was rotated is joined with the (here empty) rest,
        # and lives beside the result until the end.
        rotated_query = self._rotate(query, cos, sin)
        query = self._join_rest(rotated_query, query)
        rotated_key = self._rotate(key, cos, sin)
        key = self._join_rest(rotated_key, key)
        return query, key

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.view(x.size(0), -1, self.head_size).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _join_rest(self, rotated: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rest = x.view(x.size(0), -1, self.head_size)[..., rotated.size(-1) :]
        return torch.cat((rotated, rest), dim=-1).reshape(x.shape)


class AscendRotaryEmbedding(RotaryEmbedding):
    """The embedding as one vendor kernel, in place.

    Upstream applies it by a Triton kernel that works in place on contiguous queries and keys and allocates nothing. The
    vendor operator that behaves the same is ``npu_apply_rotary_pos_emb`` (head dimensions 64 and 128); it takes the
    cosines and sines of the batch from the runner's buffers. ``_npu_rotary_embedding`` would keep four caches for ever.
    """

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        # Upstream keeps cosines and sines a second time, each doubled to the head dimension; one tensor, two views.
        half = self.head_size // 2
        cos_and_sin = self.cos_sin_cache.view(-1, 2, half).repeat(1, 1, 2)
        self.register_buffer("cos_cache", cos_and_sin[:, 0], persistent=False)
        self.register_buffer("sin_cache", cos_and_sin[:, 1], persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedded queries and keys: the same tensors, or contiguous copies of views."""
        del positions
        query = query.contiguous()
        key = key.contiguous()
        torch_npu.npu_apply_rotary_pos_emb(
            query.view(1, query.size(0), -1, self.head_size),
            key.view(1, key.size(0), -1, self.head_size),
            context.cos,
            context.sin,
        )
        return query, key


def make_rotary_embedding(build: BuildContext) -> RotaryEmbedding:
    """The model's rotary embedding; upstream has an Ascend implementation for plain frequencies only."""
    scaled = build.config.model.rope_scaling is not None
    return RotaryEmbedding(build) if scaled else AscendRotaryEmbedding(build)


class CosSinBuffers:
    """The runner's persistent cosines and sines, which :class:`AscendRotaryEmbedding` reads the batch's rows of.

    Args:
        max_num_tokens: Rows.
        rotary_dim: Elements of a row.
        dtype: The model's dtype.
        device: Where they live.
    """

    def __init__(self, max_num_tokens: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cos = torch.ones(1, max_num_tokens, 1, rotary_dim, dtype=dtype, device=device)
        self.sin = torch.zeros(1, max_num_tokens, 1, rotary_dim, dtype=dtype, device=device)

    def update(self, cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the batch's positions; returns the rows (cosines, sines) as views of the buffers."""
        num_tokens = positions.size(0)
        buffers = (self.cos[:, :num_tokens], self.sin[:, :num_tokens])
        for part, buffer in enumerate(buffers):
            # As upstream, everything is looked up once for each part, and doubled before the part is taken.
            buffer.copy_(
                cos_sin_cache.index_select(0, positions).view(num_tokens, 2, -1).repeat(1, 1, 2).chunk(2, dim=-2)[part]
            )
        return buffers


def inverse_frequencies(model: ModelConfig, device: torch.device) -> torch.Tensor:
    """The frequency of each pair of elements, [head dim / 2]."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim
    frequencies: torch.Tensor = 1.0 / (model.rope_theta**exponents)
    return frequencies if model.rope_scaling is None else _scale_llama3(frequencies, model.rope_scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    low_or_blended = torch.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return torch.where(turns > scaling.high_freq_factor, frequencies, low_or_blended)

"""Rotary position embeddings: the caches made at load time, and their application to queries and keys."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch_npu
from torch import nn

from xlite_runner.config import ModelConfig
from xlite_runner.config.rope import DynamicNTKRopeScaling, LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.layers import BuildContext


class RotaryEmbedding(nn.Module):
    """The embedding in torch's own operators, which upstream uses on Ascend for most kinds of scaled frequencies.

    Attributes:
        cos_sin_cache: [positions, head dim]: cosines, then sines.
        uses_rows_of_batch: Whether it takes cosines and sines of the batch from the runner's buffers.
    """

    uses_rows_of_batch: ClassVar[bool] = False

    cos_sin_cache: torch.Tensor

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        model = build.config.model
        self.head_size = model.head_dim
        self.register_buffer("cos_sin_cache", cos_sin_table(model, build.device).to(build.dtype), persistent=False)

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


class AscendYaRNRotaryEmbedding(RotaryEmbedding):
    """The embedding as one vendor kernel, in place; upstream has it for YaRN and for plain frequencies.

    Upstream applies it by a Triton kernel that works in place on contiguous queries and keys and allocates nothing. The
    vendor operator that behaves the same is ``npu_apply_rotary_pos_emb`` (head dimensions 64 and 128); it takes the
    cosines and sines of the batch from the runner's buffers. ``_npu_rotary_embedding`` would keep four caches for ever.
    """

    uses_rows_of_batch = True

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


class AscendRotaryEmbedding(AscendYaRNRotaryEmbedding):
    """The same for plain frequencies."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build)
        # Upstream keeps cosines and sines a second time, each doubled to the head dimension; one tensor, two views.
        half = self.head_size // 2
        cos_and_sin = self.cos_sin_cache.view(-1, 2, half).repeat(1, 1, 2)
        self.register_buffer("cos_cache", cos_and_sin[:, 0], persistent=False)
        self.register_buffer("sin_cache", cos_and_sin[:, 1], persistent=False)


def make_rotary_embedding(build: BuildContext) -> RotaryEmbedding:
    """The model's rotary embedding."""
    scaling = build.config.model.rope_scaling
    if scaling is None:
        return AscendRotaryEmbedding(build)
    return AscendYaRNRotaryEmbedding(build) if isinstance(scaling, YarnRopeScaling) else RotaryEmbedding(build)


class CosSinBuffers:
    """The runner's persistent cosines and sines, which :class:`AscendYaRNRotaryEmbedding` reads the batch's rows of.

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


def cos_sin_table(model: ModelConfig, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of each position; [positions, head dim] in float32."""
    scaling, num_positions, magnitude = model.rope_scaling, float(model.max_position_embeddings), 1.0
    frequencies = _inverse_frequencies(model, model.rope_theta, device)
    if isinstance(scaling, Llama3RopeScaling):
        frequencies = _scale_llama3(frequencies, scaling)
    elif isinstance(scaling, YarnRopeScaling):
        frequencies = _scale_yarn(frequencies, model, scaling)
        num_positions = scaling.original_max_position_embeddings * scaling.factor
        magnitude = scaling.attn_factor * (0.1 * math.log(max(scaling.factor, 1.0)) + 1.0)
    elif isinstance(scaling, LinearRopeScaling):
        frequencies = frequencies / scaling.factor
        num_positions *= scaling.factor
    elif isinstance(scaling, DynamicNTKRopeScaling):
        frequencies = _inverse_frequencies(model, _dynamic_theta(model, scaling), device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, sines) if magnitude == 1 else (cosines * magnitude, sines * magnitude), dim=-1)


def _inverse_frequencies(model: ModelConfig, theta: float, device: torch.device) -> torch.Tensor:
    frequencies: torch.Tensor = 1.0 / (
        theta ** (torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device) / model.head_dim)
    )
    return frequencies


def _dynamic_theta(model: ModelConfig, scaling: DynamicNTKRopeScaling) -> float:
    trained = scaling.max_trained_positions or model.max_position_embeddings
    growth = scaling.factor * model.max_position_embeddings / trained - (scaling.factor - 1)
    return float(model.rope_theta * growth ** (model.head_dim / (model.head_dim - 2)))


def _scale_yarn(frequencies: torch.Tensor, model: ModelConfig, scaling: YarnRopeScaling) -> torch.Tensor:
    """Frequencies of few turns divided by the factor, those of many kept, a ramp over the elements between."""

    def element_with(turns: float) -> float:
        per_radian = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return model.head_dim * math.log(per_radian) / (2 * math.log(model.rope_theta))

    low = max(element_with(scaling.beta_fast), 0.0)  # not rounded: vllm-ascend has truncate=False
    high = min(element_with(scaling.beta_slow), model.head_dim - 1.0)
    elements = torch.arange(model.head_dim // 2, dtype=torch.float32, device=frequencies.device)
    ramp = ((elements - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    low_or_blended = torch.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return torch.where(turns > scaling.high_freq_factor, frequencies, low_or_blended)

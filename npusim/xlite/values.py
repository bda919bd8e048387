"""The numbers of a forward pass, in a world of real values: multi-head attention, dense and routed experts, TP.

Computed on the host where the model's operators would be: products in the model's type, norms, rotation, attention and
routing in float32, each rounded once. Grade: assumed (xlite's kernels round in places of their own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from npusim.errors import UnmodelledCallError
from npusim.ops.attention_math import CAUSAL_RIGHT, Masking, attend, from_pages
from npusim.ops.rope import rotated
from npusim.torch_backend.registration import platform
from npusim.xlite.config import AttnType, QuantKind, ScoringFuncType

if TYPE_CHECKING:
    from npusim.xlite.rank_model import RankModel

_PER_LAYER = (
    *("attn_norm", "mha_qkv", "mha_qkv_bias", "mha_q_norm", "mha_k_norm", "attn_out"),
    *("mlp_norm", "mlp_up_gate", "mlp_down", "gate", "re_up_gate", "re_down"),
)
_QUANTISED_FAMILIES = ("mha_qkv", "attn_out", "mlp_up_gate", "mlp_down")


@dataclass(frozen=True, slots=True)
class Batch:
    """``AttnMeta`` on the host, except for the positions."""

    lens: Sequence[int]
    cached_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    positions: torch.Tensor | None

    @classmethod
    def of(cls, meta: Any) -> Batch:
        """What an ``AttnMeta`` holds, each list copied once."""
        return cls(meta.lens, meta.cached_lens, meta.block_tables_cpu, meta.positions)


def check_has_values(model: RankModel, source: torch.Tensor) -> None:
    """Whether the numbers of a model's forward on these inputs are modelled.

    Raises:
        UnmodelledCallError: They are not.
    """
    config, weights = model.config, model.weights
    wrong = None
    if source.is_floating_point():
        wrong = "embeddings as input"
    elif config.attn_type != AttnType.AttnMHA:
        wrong = f"attn_type {config.attn_type!r}"
    elif config.qk_norm_full:
        wrong = "qk_norm_full"
    elif config.n_shared_experts:
        wrong = "shared experts"
    elif config.def_dp_size > 1:
        wrong = "data parallelism"
    elif config.scoring_func != ScoringFuncType.ScoringFuncSoftmax:
        wrong = f"scoring_func {config.scoring_func!r}"
    elif weights.experts_quantised or any(
        getattr(weights, family) is not QuantKind.NONE for family in _QUANTISED_FAMILIES
    ):
        wrong = "quantised weights"
    if wrong is not None:
        raise UnmodelledCallError(f"xlite._C.Model.forward computes no values with {wrong}; use a world of shapes")


class ForwardValues:
    """One forward pass.

    Args:
        model: Sizes.
        weights: Object with xlite's weight attributes, on the device.
        batch: The requests.
        kv_cache: By layer keys and values, on the device.
        freqs_cis: [positions, rotary size]: cosines, then sines, on the device.
        all_reduce: Sums a host tensor over the TP ranks.
    """

    def __init__(
        self,
        model: RankModel,
        weights: Any,
        batch: Batch,
        kv_cache: Sequence[Sequence[torch.Tensor]],
        freqs_cis: torch.Tensor,
        all_reduce: Any,
    ) -> None:
        self._model = model
        self._config = model.config
        self._weights = {name: getattr(weights, name) for name in _PER_LAYER}  # each access copies the list
        self._embed, self._norm = weights.embed, weights.norm
        self._batch = batch
        self._kv_cache = kv_cache
        self._all_reduce = all_reduce
        angles = _host(freqs_cis)[self._positions()]
        half = angles.shape[-1] // 2
        self._cos, self._sin = (part.repeat(1, 2).unsqueeze(1) for part in (angles[:, :half], angles[:, half:]))

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm, on the host; writes the batch's keys and values into the cache."""
        config = self._config
        residual = self._embedding(_host(input_ids)[: sum(self._batch.lens)].long())
        hidden = torch.zeros_like(residual)
        for layer in range(config.n_layers):
            hidden, residual = self._add_norm(hidden, residual, self._weights["attn_norm"][layer])
            hidden = self._attention(layer, hidden)
            hidden, residual = self._add_norm(hidden, residual, self._weights["mlp_norm"][layer])
            n_dense = config.n_dense_layers
            hidden = self._mlp(layer, hidden) if layer < n_dense else self._experts(layer - n_dense, hidden)
        return self._add_norm(hidden, residual, self._norm)[0]

    def _embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Each TP rank has as many rows of the vocabulary as the others."""
        weight = _host(self._embed)
        rows = ids - self._tp_rank * len(weight)
        is_own = (rows >= 0) & (rows < len(weight))
        embedded = weight[rows.clamp(0, len(weight) - 1)].masked_fill(~is_own.unsqueeze(-1), 0)
        return self._reduced(embedded)

    def _positions(self) -> torch.Tensor:
        """As told, else counted from the cached tokens."""
        batch = self._batch
        if batch.positions is not None:
            return _host(batch.positions)[: sum(batch.lens)].long()
        spans = zip(batch.cached_lens, batch.lens, strict=False)
        return torch.cat([torch.arange(cached, cached + length) for cached, length in spans])

    @property
    def _tp_rank(self) -> int:
        return self._model.rank % self._config.def_tp_size

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = self._all_reduce(x)
        return reduced

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x.float() + residual.float()).to(x.dtype)
        return self._rms_norm(total, weight), total

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.norm_eps)
        return (wide * scale * _host(weight).float()).to(x.dtype)

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, model, weights = self._config, self._model, self._weights
        bias = _host(weights["mha_qkv_bias"][layer]) if config.qkv_bias else None
        qkv = functional.linear(x, _host(weights["mha_qkv"][layer]), bias)
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        query, key, value = heads.split([model.q_heads, model.kv_heads, model.kv_heads], dim=1)
        if config.qk_norm:
            query = self._rms_norm(query, weights["mha_q_norm"][layer])
            key = self._rms_norm(key, weights["mha_k_norm"][layer])
        query, key = (rotated(part, self._cos, self._sin) for part in (query, key))
        outputs = []
        start = 0
        for length, cached, table in zip(
            self._batch.lens, self._batch.cached_lens, self._batch.block_tables, strict=False
        ):
            rows = slice(start, start + length)
            start += length
            caches = self._kv_cache[layer]
            for cache, new in zip(caches, (key[rows], value[rows]), strict=True):
                self._write_to_cache(cache, new, cached, table)
            keys, values = (
                from_pages(_host(cache), torch.tensor(table), cached + length, model.kv_heads) for cache in caches
            )
            outputs.append(attend(query[rows], keys, values, config.softmax_scale, Masking(CAUSAL_RIGHT))[0])
        output = torch.cat(outputs).flatten(1)
        return self._reduced(functional.linear(output, _host(weights["attn_out"][layer])))

    def _write_to_cache(self, cache: torch.Tensor, new: torch.Tensor, cached: int, table: Sequence[int]) -> None:
        """Rows into their slots, a block at a time."""
        block_size, done = self._config.block_size, 0
        while done < len(new):
            block, offset = divmod(cached + done, block_size)
            count = min(block_size - offset, len(new) - done)
            platform().values.write(cache[table[block], offset : offset + count], new[done : done + count])
            done += count

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        gate_up = functional.linear(x, _host(self._weights["mlp_up_gate"][layer]))
        return self._reduced(functional.linear(_swiglu(gate_up), _host(self._weights["mlp_down"][layer])))

    def _experts(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """This rank's experts (or its part of each) for the tokens that are routed to them; summed over TP."""
        config = self._config
        scores = functional.linear(x, _host(self._weights["gate"][layer])).float().softmax(-1)
        top_scores, top_experts = scores.topk(config.n_act_experts, dim=-1)
        if config.norm_topk_prob:
            top_scores = top_scores / top_scores.sum(-1, keepdim=True)
        top_scores = top_scores.to(x.dtype).float()
        num_local = config.n_routed_experts // config.moe_ep_size
        first = (self._model.rank // config.moe_tp_size) % config.moe_ep_size * num_local
        total = torch.zeros(x.shape)
        for local in range(num_local):
            tokens, places = (top_experts == first + local).nonzero(as_tuple=True)
            if len(tokens):
                number = layer * num_local + local
                result = self._expert(number, x[tokens])
                total.index_add_(0, tokens, result.float() * top_scores[tokens, places].unsqueeze(-1))
        return self._reduced(total.to(x.dtype))

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        up_gate, down = (_host(self._weights[name][number]) for name in ("re_up_gate", "re_down"))
        if self._config.experts_weight_transpose:
            return _swiglu(x @ up_gate) @ down
        return functional.linear(_swiglu(functional.linear(x, up_gate)), down)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return platform().values.read(tensor)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)

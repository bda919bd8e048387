"""What one forward pass of xlite moves, multiplies and sends, kernel by kernel, and how long that takes.

The kernels are those that a layer cannot do without; what xlite fuses beyond that is not public. A pass runs on the
device from end to end: the host launches it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from npusim.device.cost import CostModel, Product, Sending, Unit, Work
from npusim.xlite.config import AttnType, ModelConfig, QuantKind, WeightFacts
from npusim.xlite.rank_model import RankModel

Item = Work | Sending


@dataclass(frozen=True)
class Lengths:
    """How long a pass' requests are, in tokens.

    Attributes:
        lens: New tokens of each request.
        cached_lens: Tokens of each whose keys and values are in the cache.
    """

    lens: Sequence[int]
    cached_lens: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.lens)

    @property
    def num_keys(self) -> int:
        """Keys that are read, of all requests."""
        return sum(self.lens) + sum(self.cached_lens)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(n * (n + 1) // 2 + n * cached for n, cached in zip(self.lens, self.cached_lens, strict=True))


class ForwardTime:
    """Duration of a pass on one rank, once all ranks of its groups have arrived. Grade: calibrated, docs/time.md.

    Only attention's own kernels know how long sequences are; the rest is computed once for each number of new tokens.

    Args:
        model: The rank's model.
        costs: Of its device.
    """

    def __init__(self, model: RankModel, costs: CostModel) -> None:
        self._model = model
        self._costs = costs
        self._rest_ns: dict[int, int] = {}

    def __call__(self, batch: Lengths) -> int:
        """Nanoseconds of a pass over requests of these lengths."""
        num_tokens = batch.num_tokens
        if num_tokens not in self._rest_ns:
            self._rest_ns[num_tokens] = self._without_attention(batch)
        over_keys = _duration(_over_keys(self._model, batch), self._costs)
        return self._rest_ns[num_tokens] + self._model.config.n_layers * over_keys

    def _without_attention(self, batch: Lengths) -> int:
        model, costs = self._model, self._costs
        layers, dense = model.config.n_layers, model.config.n_dense_layers
        total = _duration(_embedding(model, batch), costs)
        total += layers * _duration(_projections(model, batch), costs)
        total += dense * _duration(_dense_ffn(model, batch), costs)
        if layers > dense:
            total += (layers - dense) * _duration(_moe_ffn(model, batch), costs)
        return total


def _duration(items: Iterator[Item], costs: CostModel) -> int:
    return sum(costs.collective_ns(*item) if isinstance(item, Sending) else costs.kernel_ns(item) for item in items)


def _embedding(model: RankModel, batch: Lengths) -> Iterator[Item]:
    hidden = _hidden_bytes(model, batch.num_tokens)
    yield Work(Unit.VECTOR, 2 * hidden)
    yield Sending("all_reduce", hidden, model.tp.size)


def _projections(model: RankModel, batch: Lengths) -> Iterator[Item]:
    """Attention without its kernels over keys."""
    n, hidden = batch.num_tokens, _hidden_bytes(model, batch.num_tokens)
    yield Work(Unit.VECTOR, 4 * hidden)  # adds the residual and norms
    yield from _mha_projections(model, n) if model.config.attn_type == AttnType.AttnMHA else _mla_projections(model, n)
    yield _linear(n, _out_width(model), model.config.hidden_size, model.weights, model.weights.attn_out)
    yield Sending("all_reduce", hidden, model.tp.size)


def _over_keys(model: RankModel, batch: Lengths) -> Iterator[Work]:
    """The kernels of a layer that read keys, so that their work depends on how long sequences are."""
    config, n, itemsize = model.config, batch.num_tokens, _itemsize(model)
    heads, keys, pairs = model.q_heads, batch.num_keys, batch.num_pairs
    if config.attn_type == AttnType.AttnMHA:
        moved = (2 * n * heads + 2 * keys * model.kv_heads) * config.head_dim * itemsize
        yield Work(Unit.ATTENTION, moved, attention_flops=4 * pairs * heads * config.head_dim)
        return
    if config.attn_type == AttnType.AttnDSA:
        width = config.index_n_heads * config.index_head_dim
        yield Work(Unit.ATTENTION, (n * width + keys * config.index_head_dim) * itemsize, (), 2 * pairs * width)
        pairs = min(pairs, n * config.index_topk)
        keys = min(keys, pairs)
    latent, rope = config.kv_lora_rank, config.rope_head_dim
    moved = (n * heads * (2 * latent + rope) + keys * (latent + rope)) * itemsize
    yield Work(Unit.ATTENTION, moved, attention_flops=2 * pairs * heads * (2 * latent + rope))


def _out_width(model: RankModel) -> int:
    config = model.config
    return model.q_heads * (config.head_dim if config.attn_type == AttnType.AttnMHA else config.v_head_dim)


def _mha_projections(model: RankModel, n: int) -> Iterator[Item]:
    qkv_width = (model.q_heads + 2 * model.kv_heads) * model.config.head_dim
    yield _linear(n, model.config.hidden_size, qkv_width, model.weights, model.weights.mha_qkv)
    yield Work(Unit.VECTOR, 2 * n * qkv_width * _itemsize(model))  # norms, rotation, keys and values into the cache


def _mla_projections(model: RankModel, n: int) -> Iterator[Item]:
    config, itemsize = model.config, _itemsize(model)
    latent, rope, heads = config.kv_lora_rank, config.rope_head_dim, model.q_heads
    down_width = config.q_lora_rank + latent + rope
    query_width = heads * (config.nope_head_dim + rope)
    yield _linear(n, config.hidden_size, down_width, model.weights, model.weights.mla_qkv_a)
    yield Work(Unit.VECTOR, 2 * n * down_width * itemsize)
    yield _linear(n, config.q_lora_rank, query_width, model.weights, model.weights.mla_q_b)
    yield Work(Unit.VECTOR, 2 * n * query_width * itemsize)
    if config.attn_type == AttnType.AttnDSA:
        width = config.index_n_heads * config.index_head_dim
        yield _linear(n, config.q_lora_rank, width, model.weights, model.weights.index_q_b)
        key_width = config.index_head_dim + config.index_n_heads
        yield _linear(n, config.hidden_size, key_width, model.weights, QuantKind.NONE)
    yield _per_head(n, config.nope_head_dim, latent, heads, itemsize)
    yield _per_head(n, latent, config.v_head_dim, heads, itemsize)


def _dense_ffn(model: RankModel, batch: Lengths) -> Iterator[Item]:
    hidden = _hidden_bytes(model, batch.num_tokens)
    yield Work(Unit.VECTOR, 4 * hidden)
    yield from _mlp(model, batch.num_tokens, model.mlp_width, model.weights.mlp_up_gate, model.weights.mlp_down)
    yield Sending("all_reduce", hidden, model.tp.size)


def _mlp(model: RankModel, n: int, width: int, up_gate: QuantKind, down: QuantKind) -> Iterator[Item]:
    yield _linear(n, model.config.hidden_size, 2 * width, model.weights, up_gate)
    yield Work(Unit.VECTOR, 3 * n * width * _itemsize(model))
    yield _linear(n, width, model.config.hidden_size, model.weights, down)


def _moe_ffn(model: RankModel, batch: Lengths) -> Iterator[Item]:
    """Routed experts chosen evenly; an expert that no token chose is not read. Grade of that: assumed."""
    config, n, itemsize = model.config, batch.num_tokens, _itemsize(model)
    everyones = n * config.def_dp_size
    hidden = _hidden_bytes(model, n)
    yield Work(Unit.VECTOR, 4 * hidden)
    yield _linear(n, config.hidden_size, config.n_routed_experts, model.weights, QuantKind.NONE)
    yield Work(Unit.VECTOR, 2 * n * config.n_routed_experts * model.weights.gate_dtype.bits // 8)
    yield Sending("all_gather", hidden * config.def_dp_size, config.def_dp_size)

    rows = -(-everyones * config.n_act_experts // config.moe_ep_size)
    width = config.moe_intermediate_size // config.moe_tp_size
    yield Work(Unit.VECTOR, 2 * rows * config.hidden_size * itemsize)
    yield _experts(model, rows, everyones, config.hidden_size, 2 * width)
    yield Work(Unit.VECTOR, 3 * rows * width * itemsize)
    yield _experts(model, rows, everyones, width, config.hidden_size)
    yield Work(Unit.VECTOR, (rows + everyones) * config.hidden_size * itemsize)

    yield Sending("reduce_scatter", hidden * config.def_dp_size, config.def_dp_size)
    if model.runs_shared_experts:
        yield from _mlp(model, n, model.shared_width, model.weights.se_up_gate, model.weights.se_down)
    yield Sending("all_reduce", hidden, model.tp.size)


def _experts(model: RankModel, rows: int, num_tokens: int, inner: int, columns: int) -> Work:
    """One grouped product: the rows of the experts that are used, each with its weight."""
    config = model.config
    own = config.n_routed_experts // config.moe_ep_size
    used = min(max(round(own * _share_used(config, num_tokens)), 1), own, max(rows, 1))
    bits = 8 if model.weights.experts_quantised else model.weights.dtype.bits
    moved = used * inner * columns * bits // 8 + rows * (inner + columns) * _itemsize(model)
    return Work(Unit.MATMUL, moved, (Product(-(-rows // used), inner, columns, used, bits),))


def _share_used(config: ModelConfig, num_tokens: int) -> float:
    """Expected share of the experts that at least one token chooses: 1 - (1 - k / E) ** tokens.

    By squaring, whose rounding is the same on every machine.
    """
    unused, factor = 1.0, 1.0 - config.n_act_experts / config.n_routed_experts
    while num_tokens:
        if num_tokens % 2:
            unused *= factor
        factor *= factor
        num_tokens //= 2
    return 1.0 - unused


def _linear(n: int, inner: int, columns: int, weights: WeightFacts, quant: QuantKind) -> Work:
    bits = weights.dtype.bits if quant is QuantKind.NONE else 8
    moved = inner * columns * bits // 8 + n * (inner + columns) * weights.dtype.bits // 8
    return Work(Unit.MATMUL, moved, (Product(n, inner, columns, 1, bits),))


def _per_head(n: int, inner: int, columns: int, heads: int, itemsize: int) -> Work:
    moved = heads * (inner * columns + n * (inner + columns)) * itemsize
    return Work(Unit.MATMUL, moved, (Product(n, inner, columns, heads, itemsize * 8),))


def _itemsize(model: RankModel) -> int:
    return model.weights.dtype.bits // 8


def _hidden_bytes(model: RankModel, num_tokens: int) -> int:
    return num_tokens * model.config.hidden_size * _itemsize(model)

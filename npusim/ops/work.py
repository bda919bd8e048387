"""What each operator moves and multiplies, for its duration: for those that do not simply stream their tensors.

An operator that is not in :data:`WORK` reads all of its device tensors and writes all of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from npusim.device.cost import Product, Sending, Unit, Work, product_work
from npusim.torch_backend.registration import platform


class Call:
    """One call of an operator, after it was made.

    Args:
        positions: Places of the operator's parameters.
        args: Given by position.
        kwargs: Given by name.
        results: What it returned.
    """

    __slots__ = ("_args", "_kwargs", "_positions", "results")

    def __init__(
        self, positions: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> None:
        self._positions = positions
        self._args = args
        self._kwargs = kwargs
        self.results = results

    def get(self, name: str) -> Any:
        """An argument; None if it was not given."""
        position = self._positions.get(name, -1)
        return self._args[position] if 0 <= position < len(self._args) else self._kwargs.get(name)

    def first(self, names: Sequence[str]) -> Any:
        """The first of some arguments that was given; None if none was."""
        for name in names:
            if (value := self.get(name)) is not None:
                return value
        return None

    def others(self, *names: str) -> list[Any]:
        """All arguments and results but those of these names."""
        return [*(self.get(name) for name in self._positions if name not in names), self.results]


WorkOf = Callable[[Call], Work]


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a value, those in lists included."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return 0


def _bits(tensor: Tensor) -> int:
    return min(tensor.element_size(), 4) * 8


def _nothing(call: Call) -> Work:
    return Work(Unit.VECTOR, 0)


def _gathered(call: Call) -> Work:
    """Reads no more than it writes, out of something large."""
    return Work(Unit.VECTOR, 2 * bytes_of(call.results))


def _placed(*names: str) -> WorkOf:
    """Writes some arguments into their places in something large."""
    return lambda call: Work(Unit.VECTOR, 2 * sum(bytes_of(call.get(name)) for name in names))


def _but(*names: str, unit: Unit = Unit.VECTOR) -> WorkOf:
    """Streams all its tensors but some, of which it touches a few rows."""
    return lambda call: Work(unit, bytes_of(call.others(*names)))


# ---- products


class ProductOf:
    """``left @ right``, or ``left @ right.T``; batches of it where ``right`` has three dimensions.

    Args:
        left: Name of an argument.
        right: Name of another one.
        transposed: Whether ``right`` is.
    """

    def __init__(self, left: str, right: str, *, transposed: bool = False) -> None:
        self.left = left
        self.right = right
        self.transposed = transposed

    def __call__(self, call: Call) -> Work:
        """The work of one call."""
        second = call.get(self.right)
        sizes = call.get(self.left).shape, second.shape
        return product_work(*sizes, second.itemsize, bytes_of(call.results), self.transposed)


def _grouped(left: str, right: str) -> WorkOf:
    """Rows by experts' weights; an expert without rows is not read. Rows are taken to be spread evenly."""

    def work(call: Call) -> Work:
        x, weights = _listed(call.get(left)), _listed(call.get(right))
        num_experts = sum(weight.shape[0] if weight.dim() > 2 else 1 for weight in weights)
        num_rows = sum(one.shape[0] for one in x)
        num_used = max(1, min(num_experts, num_rows))
        inner = x[0].shape[-1]
        elements = sum(weight.numel() for weight in weights) // num_experts
        product = Product(-(-num_rows // num_used), inner, elements // inner, num_used, _bits(weights[0]))
        moved = bytes_of(call.others(right)) + bytes_of(weights) * num_used // num_experts
        return Work(Unit.MATMUL, moved, (product,))

    return work


def _product_and_collective(left: str, right: str, name: str) -> WorkOf:
    """``left @ right`` and a collective of it, or of ``left`` before that."""
    product = ProductOf(left, right)

    def work(call: Call) -> Work:
        num_ranks, computed = platform().hccl_communicator(call.get("hcom")).num_ranks, product(call)
        (own,) = computed.products
        if name == "all_gather":
            everyones = own._replace(rows=own.rows * num_ranks)
            sending = Sending(name, bytes_of(call.get(left)) * num_ranks, num_ranks)
            return computed._replace(products=(everyones,), sending=sending)
        num_bytes = bytes_of(call.results) * (num_ranks if name == "reduce_scatter" else 1)
        return computed._replace(sending=Sending(name, num_bytes, num_ranks))

    return work


def _routed(rows: str) -> WorkOf:
    """A row for each choice of each token, to the experts' ranks or back from them."""

    def work(call: Call) -> Work:
        x = call.get(rows)
        num_bytes = call.get("expert_ids").numel() * bytes_of(x) // max(x.shape[0], 1)
        return Work(Unit.VECTOR, 2 * num_bytes, sending=Sending("all_to_all", num_bytes, call.get("ep_world_size")))

    return work


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


# ---- attention

_QUERIES = ("query", "q_nope")
_TABLES = ("block_table", "block_tables")
_KEYS = ("key", "key_cache", "ctkv", "k_nope")
_HEADS = ("num_heads", "num_query_heads", "head_num", "q_headnum")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_head_num", "kv_headnum")


def _attention(call: Call) -> Work:
    """Queries, results, and each sequence's keys and values once; a query sees the keys up to its own place."""
    query, key, table = call.first(_QUERIES), call.first(_KEYS), call.first(_TABLES)
    layout = call.get("input_layout") or ("TH" if query.dim() == 2 else "TND" if query.dim() == 3 else "BNSD")
    heads = call.first(_HEADS) or query.shape[layout.index("N")]
    kv_heads = call.first(_KV_HEADS) or (key.shape[layout.index("N")] if table is None and "N" in layout else heads)
    caches = [key, call.first(("value", "value_cache")), call.first(("key_rope", "k_rope"))]

    page_size = call.get("block_size") or key.shape[1] if table is not None else 0
    num_rows = key.shape[0] * page_size if table is not None else _rows(key, kv_heads, layout)
    row_bytes = bytes_of(caches) // max(num_rows, 1)
    batch = query.shape[layout.index("B")] if "B" in layout else table.shape[0] if table is not None else 1
    room = num_rows if table is None else table.numel() * page_size
    keys = _lengths(call, ("actual_seq_lengths_kv", "actual_seq_kvlen", "context_lens"), table is None, layout)
    keys = keys or _lengths(call, ("seq_len", "seqlen"), False, layout) or [room // batch] * batch
    queries = _lengths(call, ("actual_seq_lengths", "actual_seq_qlen"), True, layout) if "T" in layout else None
    queries = queries or _lengths(call, ("seq_len", "seqlen", "qseqlen"), False, layout)
    if queries is None or len(queries) != len(keys):
        queries = [-(-_rows(query, heads, layout) // len(keys))] * len(keys)

    moved = bytes_of([query, call.first(("query_rope", "q_rope")), call.results]) + sum(keys) * row_bytes
    pairs = sum(q * k - min(q * (q - 1) // 2, q * k) for q, k in zip(queries, keys, strict=True))
    row_size = row_bytes // key.element_size() // kv_heads
    return Work(Unit.ATTENTION, moved, attention_flops=2 * pairs * heads * row_size)


def _rows(tensor: Tensor, heads: int, layout: str) -> int:
    """Tokens of queries, keys or values that lie one after another."""
    return tensor.numel() // max(tensor.shape[-1] * (1 if "H" in layout else heads), 1)


def _lengths(call: Call, names: Sequence[str], are_ends: bool, layout: str) -> list[int] | None:
    """Lengths that the host knows; in packed layouts some are given as ends."""
    given = call.first(names)
    if isinstance(given, Tensor):
        given = given.flatten().tolist() if given.is_cpu else None
    if not given:
        return None
    numbers = [int(number) for number in given]
    if are_ends and layout[0] in "TN" and "T" in layout:
        return [end - start for start, end in pairwise([0, *numbers])]
    return numbers


def _sparse(call: Call) -> Work:
    """Attention to chosen keys: as many of them as there are indices."""
    query, key, chosen = call.get("query"), call.get("key"), call.get("sparse_indices")
    width = bytes_of(key[:1, :1]) // max(key.shape[2] if key.dim() == 4 else 1, 1)
    moved = bytes_of(query) + bytes_of(call.results) + chosen.numel() * width
    heads = query.shape[-2]
    flops = 4 * chosen.numel() * heads * query.shape[-1]
    return Work(Unit.ATTENTION, moved, attention_flops=flops)


def _indexer(call: Call) -> Work:
    """Scores of all keys that the block table can reach, for each query."""
    query, key, table = call.get("query"), call.get("key"), call.get("block_table")
    keys = key.numel() // key.shape[-1] if table is None else table.numel() * key.shape[1]
    moved = bytes_of(query) + bytes_of(call.results) + keys * key.shape[-1] * key.element_size()
    sequences = table.shape[0] if table is not None else 1
    return Work(Unit.ATTENTION, moved, attention_flops=2 * query.numel() * keys // max(sequences, 1))


_FUSED = (
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score.out",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_fused_infer_attention_score_v2.out",
    "npu::npu_prompt_flash_attention",
    "npu::npu_incre_flash_attention",
    "npu::npu_fusion_attention",
    "npu::npu_fusion_attention_v2",
    "aten::scaled_dot_product_attention",
    "atb::_npu_flash_attention",
    "atb::_npu_flash_attention_prefix_v2.out",
    "atb::_npu_flash_attention_qlens",
    "atb::_npu_flash_attention_unpad",
    "atb::_npu_flash_attention_unpad_v2",
    "atb::_npu_flash_attention_v2.out",
    "atb::_npu_flash_attention_v3",
    "atb::_npu_paged_attention",
    "atb::_npu_paged_attention_mla",
    "atb::_npu_paged_attention_quant",
    "atb::_npu_paged_attention_splitfuse",
    "atb::_npu_paged_attention_splitfuse_v2",
    "atb::_npu_paged_attention_v2.out",
    "atb::npu_multi_head_latent_attention",
    "atb::npu_multi_head_latent_attention.lse",
    "atb::npu_ring_mla",
)
_SIZES_ONLY = (
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_infer_output",
    "atb::_npu_paged_attention_get_workspace",
    "atb::_npu_paged_attention_v2_get_workspace",
    "npu::get_npu_format",
    "npu::get_storage_size",
)
_PROLOGS = (
    "npu::npu_mla_prolog",
    "npu::npu_mla_prolog_v2",
    "npu::npu_mla_prolog_v3",
    "npu::npu_mla_prolog_v3_functional",
)

WAITS = frozenset({"aten::nonzero", "aten::masked_select", "aten::equal"})
"""Operators whose results the host needs at once: their size, or an answer."""

WORK: Mapping[str, WorkOf] = {
    "aten::linear": ProductOf("input", "weight", transposed=True),
    "npu::npu_linear": ProductOf("input", "weight", transposed=True),
    "aten::mm": ProductOf("self", "mat2"),
    "aten::mm.out": ProductOf("self", "mat2"),
    "aten::addmm": ProductOf("mat1", "mat2"),
    "aten::bmm": ProductOf("self", "mat2"),
    "aten::baddbmm": ProductOf("batch1", "batch2"),
    "aten::matmul": ProductOf("self", "other"),
    "aten::mv": ProductOf("self", "vec"),
    "npu::npu_transpose_batchmatmul": ProductOf("input", "weight"),
    "npu::npu_bmmV2": ProductOf("input", "mat2"),
    "npu::npu_quant_matmul": ProductOf("x1", "x2"),
    "npu::npu_weight_quant_batchmatmul": ProductOf("x", "weight"),
    "npu::npu_quant_matmul_dequant": ProductOf("x", "quantized_weight", transposed=True),
    "npu::npu_mm_all_reduce_base": _product_and_collective("x1", "x2", "all_reduce"),
    "npu::npu_mm_reduce_scatter_base": _product_and_collective("self", "x2", "reduce_scatter"),
    "npu::npu_all_gather_base_mm": _product_and_collective("self", "x2", "all_gather"),
    "npu::npu_moe_distribute_dispatch": _routed("x"),
    "npu::npu_moe_distribute_dispatch_v2": _routed("x"),
    "npu::npu_moe_distribute_combine": _routed("expand_x"),
    "npu::npu_moe_distribute_combine_v2": _routed("expand_x"),
    "npu::npu_moe_distribute_combine_add_rms_norm": _routed("expand_x"),
    "npu::npu_grouped_matmul": _grouped("x", "weight"),
    "npu::npu_grouped_matmul.List": _grouped("x", "weight"),
    "npu::npu_grouped_matmul_swiglu_quant": _grouped("x", "weight"),
    "npu::npu_grouped_matmul_swiglu_quant_v2": _grouped("x", "weight"),
    "npu::npu_grouped_matmul_finalize_routing": _grouped("x", "w"),
    "npu::npu_quant_grouped_matmul_dequant": _grouped("x", "quantized_weight"),
    **dict.fromkeys(_FUSED, _attention),
    **dict.fromkeys(_SIZES_ONLY, _nothing),
    **dict.fromkeys(_PROLOGS, _but("kv_cache", "kr_cache", unit=Unit.MATMUL)),
    "atb::npu_mla_preprocess": _but("kv_cache", "kv_cache_rope", unit=Unit.MATMUL),
    "npu::npu_sparse_flash_attention": _sparse,
    "npu::npu_kv_quant_sparse_flash_attention": _sparse,
    "npu::npu_lightning_indexer": _indexer,
    "npu::npu_quant_lightning_indexer": _indexer,
    "npu::npu_prefetch": _nothing,
    "aten::index_select": _gathered,
    "aten::embedding": _gathered,
    "aten::gather": _gathered,
    "aten::index.Tensor": _gathered,
    "npu::npu_slice": _gathered,
    "npu::npu_gather_pa_kv_cache": _placed("key", "value"),
    "npu::npu_gather_pa_kv_cache_functional": _gathered,
    "atb::npu_paged_cache_load": _gathered,
    "atb::npu_paged_cache_load.out": _placed("key", "value"),
    "atb::_npu_reshape_and_cache": _placed("key", "value"),
    "atb::_npu_reshape_and_cache_siso": _placed("key"),
    "npu::npu_scatter_pa_kv_cache": _placed("key", "value"),
    "npu::npu_scatter_pa_cache.value": _placed("key"),
    "npu::npu_kv_rmsnorm_rope_cache": _placed("kv"),
    "npu::npu_kv_rmsnorm_rope_cache_v2": _placed("kv"),
    "npu::npu_scatter_nd_update_": _placed("updates"),
    "npu::scatter_update_": _placed("updates"),
    "npu::npu_quant_scatter_": _placed("updates"),
    "aten::index_copy_": _placed("source"),
    "aten::index_add_": _placed("source"),
    "aten::index_fill_.int_Scalar": _placed("index"),
    "aten::index_put_": _placed("values"),
    "aten::scatter_.src": _placed("src"),
    "aten::scatter_.value": _placed("index"),
    "aten::scatter_add_": _placed("src"),
}
"""How the operators work that do not simply stream their tensors."""

"""Fused attention for inference (FIA) and its two predecessors.

``npu_fused_infer_attention_score`` takes three tensors of about the output's size: torch_npu makes one like the query,
one of the output's size to know that size, and then the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.attention_math import Masking, attend, from_pages, spans
from npusim.ops.operator import operator
from npusim.ops.refusal import INVALID_VALUE, refusal
from npusim.ops.shapes import scalar_type
from npusim.torch_backend.tensors import new_like

_LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "TND": ("TND", "TND"),
    "NTD": ("NTD", "NTD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "NTD_TND": ("NTD", "TND"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "TND_NTD": ("TND", "NTD"),
    "NSD": ("NSD", "NSD"),
}
"""Layouts of query and output by the ``input_layout`` that names both."""
_LAYOUT_NAMES = ", ".join(name for name in _LAYOUTS if name not in ("BNSD", "NSD"))  # as the refusal lists them
_QUANTISED = (torch.int8, torch.float8_e4m3fn)


class Geometry:
    """What FIA derives from query and value.

    Args:
        query: The query.
        value: The values, or the cache of values.
        input_layout: Layouts of query and output.
        num_heads: Heads of the query.
        num_key_value_heads: Heads of the values; 0: as many.
        paged: Whether ``value`` is a paged cache.

    Raises:
        RuntimeError: In torch_npu's words.
    """

    def __init__(
        self, query: Tensor, value: Tensor, input_layout: str, num_heads: int, num_key_value_heads: int, *, paged: bool
    ) -> None:
        if num_heads <= 0:
            raise refusal(f"num_heads should be greater than 0, but the actual value is{num_heads}", INVALID_VALUE)
        if input_layout not in _LAYOUTS:
            raise refusal(f"layout only support {_LAYOUT_NAMES}, but got BSH", INVALID_VALUE)
        self.query_layout, self.output_layout = _LAYOUTS[input_layout]
        if query.dim() != len(self.query_layout):
            raise refusal("query's dim should be consistent with that of Layout", INVALID_VALUE)
        extents = dict(zip(self.query_layout, query.shape, strict=True))
        if self.query_layout == "BSH":
            extents |= {"N": num_heads, "D": extents["H"] // num_heads}
        extents.setdefault("B", 1)
        kv_heads = num_key_value_heads or num_heads
        width = self._value_width(query, value, kv_heads, paged=paged) * (8 if value.dtype is torch.int32 else 1)
        if self.output_layout == "BSH":
            total = num_heads * width
            extents["H"] = total if total and extents["H"] else extents["H"]
        else:
            extents["D"] = width if width and extents["D"] else extents["D"]
        self.output_size = tuple(extents[letter] for letter in self.output_layout)
        rows = ("T", "N") if "T" in self.query_layout else ("B", "N", "S")
        self.lse_size = (*(extents[letter] for letter in rows), 1)

    def _value_width(self, query: Tensor, value: Tensor, kv_heads: int, *, paged: bool) -> int:
        if paged:
            if value.dim() == 3:
                return value.shape[2] // kv_heads
            if value.dim() == 4:
                return value.shape[3]
            if value.dim() == 5:
                return value.shape[2] * value.shape[4]
            raise refusal(
                f"when Page Attention enabled, value's dim should be 3/4/5, but got {value.dim()}", INVALID_VALUE
            )
        if value.dim() != query.dim():
            raise refusal("when Page Attention not enabled, value'dim should equal to query's dim!", INVALID_VALUE)
        return value.shape[2] // kv_heads if self.query_layout == "BSH" else value.shape[-1]


def _output_type(query: Tensor, query_rope: Tensor | None, scale: Tensor | None, out_dtype: int | None) -> torch.dtype:
    if scale is not None:
        return torch.int8 if out_dtype is None else scalar_type(out_dtype)
    if query.dtype not in _QUANTISED:
        return query.dtype
    if out_dtype is not None:
        return scalar_type(out_dtype)
    return torch.float16 if query_rope is None else query_rope.dtype


def _results(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    quant_scale: Tensor | None = None,
    out_dtype: int | None = None,
    wants_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    geometry = Geometry(query, value, input_layout, num_heads, num_key_value_heads, paged=block_table is not None)
    like_query = new_like(query)
    sized = new_like(query, geometry.output_size)
    del like_query
    output = new_like(query, geometry.output_size, _output_type(query, query_rope, quant_scale, out_dtype))
    lse = new_like(query, geometry.lse_size if wants_lse else (0,), torch.float32)
    del sized
    return output, lse


# ---- values


def _tokens(x: Tensor, layout: str, num_heads: int) -> list[Tensor]:
    """A tensor's sequences, [tokens, heads, size] each; TND and NTD come as one."""
    if layout == "BSH":
        return list(x.unflatten(-1, (num_heads, -1)))
    if layout == "BSND":
        return list(x)
    if layout == "BNSD":
        return list(x.transpose(1, 2))
    return [x if layout == "TND" else x.transpose(0, 1)]


def _assemble(sequences: Sequence[Tensor], layout: str) -> Tensor:
    if layout == "TND":
        return torch.cat(list(sequences))
    if layout in ("NTD", "NSD"):
        return torch.cat(list(sequences)).transpose(0, 1)
    stacked = torch.stack(list(sequences))
    if layout == "BSH":
        return stacked.flatten(2)
    return stacked if layout == "BSND" else stacked.transpose(1, 2) if layout == "BNSD" else stacked.permute(2, 0, 1, 3)


_COMPUTED = frozenset(
    (
        "query_rope",
        "key_rope",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "actual_seq_qlen",
        "actual_seq_kvlen",
        "block_table",
        "num_heads",
        "num_query_heads",
        "scale",
        "softmax_scale",
        "pre_tokens",
        "next_tokens",
        "input_layout",
        "num_key_value_heads",
        "sparse_mode",
        "inner_precise",
        "block_size",
        "softmax_lse_flag",
        "return_softmax_lse",
        "workspace",
        "out",
    )
)


def compute(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The values of ``npu_fused_infer_attention_score`` in both versions.

    Raises:
        UnmodelledCallError: Quantised, or with an option whose effect on values is not modelled.
    """
    others = sorted(name for name, given in options.items() if name not in _COMPUTED and given)
    layout = options.get("input_layout", "BSH")
    if others or query.dtype in _QUANTISED or layout not in _LAYOUTS:
        raise UnmodelledCallError(
            f"values of npu_fused_infer_attention_score with {others or query.dtype} are not modelled"
        )
    num_heads = options.get("num_heads", options.get("num_query_heads", 1))
    kv_heads = options.get("num_key_value_heads") or num_heads
    query_layout, output_layout = _LAYOUTS[layout]
    scale = options.get("scale", options.get("softmax_scale", 1.0))
    masking = Masking(
        options.get("sparse_mode", 0),
        options.get("atten_mask"),
        options.get("pre_tokens", 2147483647),
        options.get("next_tokens", 2147483647),
    )
    query_ends = options.get("actual_seq_lengths", options.get("actual_seq_qlen"))
    key_lengths = options.get("actual_seq_lengths_kv", options.get("actual_seq_kvlen"))
    queries = _with_rope(query, options.get("query_rope"), query_layout, num_heads)
    packed = "T" in query_layout
    if packed:
        queries = [queries[0][start:end] for start, end in spans(query_ends or [queries[0].shape[0]])]
    table = options.get("block_table")
    if table is not None:
        lengths = key_lengths or [key.shape[0] * key.shape[1]] * len(queries)
        keys = [_paged(key, options.get("key_rope"), table[i], lengths[i], kv_heads) for i in range(len(queries))]
        values = [from_pages(value, table[i], lengths[i], kv_heads) for i in range(len(queries))]
    else:
        keys = _with_rope(key, options.get("key_rope"), query_layout, kv_heads)
        values = _tokens(value, query_layout, kv_heads)
        if packed:
            ends = key_lengths or [keys[0].shape[0]]
            keys = [keys[0][start:end] for start, end in spans(ends)]
            values = [values[0][start:end] for start, end in spans(ends)]
        elif key_lengths:
            keys = [one[: key_lengths[i]] for i, one in enumerate(keys)]
            values = [one[: key_lengths[i]] for i, one in enumerate(values)]
    outputs, sums = [], []
    for index, (one, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        output, lse = attend(one, k, v, scale, masking, index)
        outputs.append(output)
        sums.append(lse)
    wants_lse = options.get("softmax_lse_flag") or options.get("return_softmax_lse")
    lse = torch.cat(sums) if packed else torch.stack(sums).transpose(1, 2)
    return _assemble(outputs, output_layout), lse.unsqueeze(-1) if wants_lse else lse.new_empty(0)


def _with_rope(x: Tensor, rope: Tensor | None, layout: str, num_heads: int) -> list[Tensor]:
    sequences = _tokens(x, layout, num_heads)
    if rope is None:
        return sequences
    return [torch.cat(pair, -1) for pair in zip(sequences, _tokens(rope, layout, num_heads), strict=True)]


def _paged(key: Tensor, rope: Tensor | None, pages: Tensor, length: int, num_heads: int) -> Tensor:
    keys = from_pages(key, pages, length, num_heads)
    return keys if rope is None else torch.cat((keys, from_pages(rope, pages, length, num_heads)), -1)


def compute_out(query: Tensor, key: Tensor, value: Tensor, *, out: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The same for the ``out`` forms."""
    return compute(query, key, value, **options)


# ---- operators


@operator("npu::npu_fused_infer_attention_score", computes=compute)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    softmax_lse_flag: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithms of the softmax's sums if asked for."""
    return _results(
        query,
        value,
        input_layout=input_layout,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        block_table=block_table,
        query_rope=query_rope,
        quant_scale=quant_scale2,
        wants_lse=softmax_lse_flag,
    )


@operator("npu::npu_fused_infer_attention_score_v2", computes=compute)
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None,
    out_dtype: int | None = None,
    return_softmax_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The same with other names."""
    return _results(
        query,
        value,
        input_layout=input_layout,
        num_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        block_table=block_table,
        query_rope=query_rope,
        quant_scale=quant_scale_out,
        out_dtype=out_dtype,
        wants_lse=return_softmax_lse,
    )


def _into(query: Tensor, key: Tensor, value: Tensor, *, out: Sequence[Tensor], **_: Any) -> tuple[Tensor, Tensor]:
    return out[0], out[1]


def _sizes_only(query: Tensor, *args: Tensor, **options: Any) -> Tensor:
    value = args[-1]
    is_v2 = "num_query_heads" in options
    output, lse = _results(
        query,
        value,
        input_layout=options.get("input_layout", "BSH"),
        num_heads=options.get("num_query_heads" if is_v2 else "num_heads", 1),
        num_key_value_heads=options.get("num_key_value_heads", 0),
        block_table=options.get("block_table"),
        query_rope=options.get("query_rope"),
        quant_scale=options.get("quant_scale_out", options.get("quant_scale2")),
        out_dtype=options.get("out_dtype"),
        wants_lse=options.get("return_softmax_lse", options.get("softmax_lse_flag", False)),
    )
    workspace = new_like(query, (0,))
    del output, lse
    return workspace


for _name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
    operator(f"npu::{_name}.out", computes=compute_out, writes=["out"], overwrites=["out"])(_into)
    operator(f"npu::_{_name}_get_max_workspace")(_sizes_only)


@operator("npu::_npu_fused_infer_attention_score_infer_output")
def npu_fused_infer_attention_score_infer_output(
    query: Tensor,
    value: Tensor,
    *,
    quant_scale2: Tensor | None = None,
    softmax_lse_flag: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Memory for the results."""
    return _results(query, value, quant_scale=quant_scale2, wants_lse=softmax_lse_flag, **options)

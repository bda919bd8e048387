"""Attention of the ATB library: into a tensor of the caller's, over packed or paged keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.atb import launch
from npusim.ops.attention_math import Masking, attend, from_pages, spans
from npusim.ops.operator import Hosts, operator, schemas
from npusim.torch_backend.tensors import new_like


def _ends(lengths: Any) -> list[int]:
    return torch.as_tensor(lengths).flatten().cumsum(0).tolist()


def _masking(mask: Tensor | None) -> Masking:
    """ATB's masks hold what is added to the scores: anything but 0 hides a key."""
    if mask is None:
        return Masking()
    hidden = mask != 0
    rows = hidden.shape[-1]
    is_causal = hidden.dim() == 2 and bool((hidden == torch.ones(hidden.shape).triu(1).bool()).all())
    return Masking(3) if is_causal and hidden.shape[-2] == rows else Masking(0, hidden)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seq_len: Any,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    queries = query.reshape(query.shape[0], num_heads, -1)
    keys = key.reshape(key.shape[0], num_kv_heads, -1)
    values = value.reshape(value.shape[0], num_kv_heads, -1)
    parts = [
        attend(queries[a:b], keys[a:b], values[a:b], scale_value, _masking(mask), i)[0]
        for i, (a, b) in enumerate(spans(_ends(seq_len)))
    ]
    return torch.cat(
        [*parts, torch.zeros(len(query) - sum(len(p) for p in parts), *parts[0].shape[1:], dtype=query.dtype)]
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seq_len: Tensor, *rest: Any, **_: Any) -> Tensor:
    scale_value, num_heads, num_kv_heads = rest[:3]
    return _packed(query, key, value, mask, seq_len, scale_value, num_heads, num_kv_heads).view(query.shape)


def _paged(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Any,
    query_lens: Any,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
) -> Tensor:
    queries = query.reshape(query.shape[0], num_heads, -1)
    outputs = torch.zeros_like(queries)
    lengths = torch.as_tensor(context_lens).flatten().tolist()
    for index, (start, end) in enumerate(spans(_ends(query_lens))):
        keys = from_pages(key_cache, block_table[index], lengths[index], num_kv_heads)
        values = from_pages(value_cache, block_table[index], lengths[index], num_kv_heads)
        outputs[start:end] = attend(queries[start:end], keys, values, scale_value, Masking(3), index)[0]
    return outputs.view(query.shape)


def _paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    ones = [1] * query.shape[0]
    return _paged(query, key_cache, value_cache, block_table, context_lens, ones, num_kv_heads, num_heads, scale_value)


def _splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    *_: Any,
    **__: Any,
) -> Tensor:
    return _paged(
        query, key_cache, value_cache, block_table, context_lens, seq_len, num_kv_heads, num_heads, scale_value
    )


def _qlens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    *_: Any,
) -> Tensor:
    return _paged(
        query, key_cache, value_cache, block_table, context_lens, seq_len, num_kv_heads, num_heads, scale_value
    )


_COMPUTED: dict[str, Callable[..., Tensor]] = {
    "_npu_flash_attention": _flash,
    "_npu_flash_attention_v3": _flash,
    "_npu_paged_attention": _paged_attention,
    "_npu_paged_attention_splitfuse": _splitfuse,
    "_npu_paged_attention_splitfuse_v2": _splitfuse,
    "_npu_flash_attention_qlens": _qlens,
}


def _declare_into(name: str) -> None:
    """An operator that writes its result into ``out``."""
    parameters = [argument.name for argument in torch._C.parse_schema(schemas()[f"atb::{name}"]).arguments]
    place = parameters.index("out")
    returns_out = name.endswith(".out")

    def into(*args: Any, **kwargs: Any) -> Tensor | None:
        out: Tensor = kwargs["out"] if "out" in kwargs else args[place]
        rest = {**kwargs, **dict(zip(parameters, args, strict=False))}
        inputs = [
            rest[parameter] for parameter in parameters if parameter not in ("out", "workspace") and parameter in rest
        ]
        launch(inputs, [out])
        return out if returns_out else None

    operator(f"atb::{name}", computes=_COMPUTED.get(name), writes=["out"], overwrites=["out"], hosts=Hosts.TAKEN)(into)


for _name in (
    "_npu_flash_attention",
    "_npu_flash_attention_prefix_v2.out",
    "_npu_flash_attention_qlens",
    "_npu_flash_attention_unpad",
    "_npu_flash_attention_unpad_v2",
    "_npu_flash_attention_v2.out",
    "_npu_flash_attention_v3",
    "_npu_paged_attention",
    "_npu_paged_attention_mla",
    "_npu_paged_attention_quant",
    "_npu_paged_attention_splitfuse",
    "_npu_paged_attention_splitfuse_v2",
    "_npu_paged_attention_v2.out",
):
    _declare_into(_name)


def _workspace(query: Tensor, *args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    result = args[-1] if out is None else out
    launch([query, *args[: len(args) - (out is None)], *options.values()], [result])
    return new_like(query, (0,), torch.uint8)


for _name in ("_npu_paged_attention_get_workspace", "_npu_paged_attention_v2_get_workspace"):
    operator(f"atb::{_name}", hosts=Hosts.TAKEN)(_workspace)


# ---- multi-head latent attention


@operator("atb::npu_multi_head_latent_attention", hosts=Hosts.TAKEN)
def npu_multi_head_latent_attention(
    q_nope: Tensor, q_rope: Tensor, ctkv: Tensor, k_rope: Tensor, block_tables: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Attention over compressed keys; modelled by its shapes."""
    output = new_like(q_rope, q_nope.shape)
    launch([q_nope, q_rope, ctkv, k_rope, block_tables, *options.values()], [output])
    return output


@operator("atb::npu_multi_head_latent_attention.lse", hosts=Hosts.TAKEN)
def npu_multi_head_latent_attention_lse(
    q_nope: Tensor,
    q_rope: Tensor,
    ctkv: Tensor,
    k_rope: Tensor,
    block_tables: Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """The same with room for logarithms of the softmax's sums, which it does not fill."""
    output = new_like(q_rope, q_nope.shape)
    launch([q_nope, q_rope, ctkv, k_rope, block_tables, *options.values()], [output])
    return output, None


@operator("atb::npu_ring_mla", hosts=Hosts.TAKEN)
def npu_ring_mla(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    value: Tensor,
    mask: Tensor,
    seqlen: Tensor,
    head_num: int,
    kv_head_num: int,
    *,
    pre_out: Tensor | None = None,
    prev_lse: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """One step over a part of the keys, merged with what came before; modelled by its shapes."""
    output = new_like(q_nope, (q_nope.shape[0], head_num, value.size(2)))
    lse = new_like(q_nope, (head_num, q_nope.shape[0]), torch.float32)
    launch([q_nope, q_rope, k_nope, k_rope, value, mask, pre_out, prev_lse], [output, lse])
    return output, lse

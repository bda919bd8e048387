"""What xlite checks in ``Model.init`` and ``Model.forward``, with its own texts.

Grade: classes and texts of ``init`` exact for 0.1.0rc11, tried on the published wheel. ``forward``: lengths of KV
caches and number of rows exact, condition, text and order read in the machine code of 0.1.0rc11 and its dev210 build
(``_C``); the other texts exact as far as the library's messages show them, without their line numbers, their order
assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from npusim.xlite.config import AttnType, ModelConfig, ScoringFuncType
from npusim.xlite.rank_model import RankModel
from npusim.xlite.values import Batch

_LATENT_TEXT = "{} attention QA/QB/QA norm/KVA/KVB/KV norm"
_TENSORS_PER_LAYER = {AttnType.AttnMHA: 2, AttnType.AttnMLA: 2, AttnType.AttnDSA: 3}


def check_weights(config: ModelConfig, weights: Any, version: str) -> None:
    """``Model.init``'s checks of how many weights there are.

    Raises:
        ValueError: In xlite's words.
        RuntimeError: Sizes of which the real library dies.
    """
    if config.moe_ep_size == 0 or config.def_tp_size == 0:
        raise RuntimeError("def_tp_size and moe_ep_size must not be 0 (the real library divides by them)")
    if config.n_routed_experts % config.moe_ep_size:
        raise ValueError("num of routed experts must be divisible by moe expert parallel size")
    if config.n_layers < config.n_dense_layers:
        raise ValueError("num of layers must be greater than or equal to num of dense layers")
    if config.n_heads % config.def_tp_size:
        raise ValueError("nHeads must be divisible by defTpSize and defTpSize > 0")
    for names, length, text in _lengths(config, version):
        if any(len(getattr(weights, name)) != length for name in names):
            raise ValueError(f"Mismatched number of {text} parameters")


def _lengths(config: ModelConfig, version: str) -> Iterator[tuple[tuple[str, ...], int, str]]:
    n_layers, n_dense = config.n_layers, config.n_dense_layers
    n_moe = n_layers - n_dense
    yield ("attn_norm", "attn_out", "mlp_norm"), n_layers, "layers attention norm or attention out or mlp norm"
    if config.attn_type == AttnType.AttnMHA:
        yield ("mha_qkv",), n_layers, "layers MHA attention QKV"
        if config.qkv_bias:
            yield ("mha_qkv_bias",), n_layers, "layers MHA attention QKV bias"
        if config.qk_norm or config.qk_norm_full:
            yield ("mha_q_norm", "mha_k_norm"), n_layers, "layers MHA attention Q/K norm"
    else:
        kind = "MLA" if config.attn_type == AttnType.AttnMLA else "DSA"
        up_projections = ("mla_kv_b",) if version.startswith("0.1") else ("mla_wuv", "mla_wuk_t")
        latent = ("mla_qkv_a", "mla_q_b", "mla_q_norm", *up_projections, "mla_kv_norm")
        yield latent, n_layers, f"layers {_LATENT_TEXT.format(kind)}"
        if kind == "DSA":
            index = ("index_q_b", "index_k_weights_proj", "index_k_norm")
            yield index, n_layers, "layers DSA attention index QB/KWeightsProj/KNorm"
    yield ("mlp_up_gate", "mlp_down"), n_dense, "dense layers up gate or down"
    if n_moe:
        num_experts = n_moe * config.n_routed_experts // config.moe_ep_size
        yield ("re_up_gate", "re_down"), num_experts, "routed experts up gate or down"
        yield ("gate",), n_moe, "moe layers gate"
        if config.scoring_func == ScoringFuncType.ScoringFuncSigmoid:
            yield ("gate_bias",), n_moe, "moe layers gate bias"
        if config.n_shared_experts:
            yield ("se_up_gate", "se_down"), n_moe, "moe layers with shared experts"


def check_forward(
    model: RankModel,
    runtime: Any,
    batch: Batch,
    kv_cache: Sequence[Sequence[Any]],
    input_shape: Any,
    output_shape: Any,
    method: str,
) -> None:
    """``Model.forward``'s checks.

    Args:
        model: The model.
        runtime: The runtime.
        batch: The batch.
        kv_cache: Tensors by layer. There may be more layers than the model has: upstream registers a drafter's, too.
        input_shape: Of token ids or embeddings.
        output_shape: Of the hidden states.
        method: Name of the native method, which opens some texts.

    Raises:
        RuntimeError: In xlite's words.
    """
    config = model.config
    _check_kv_lengths(model, kv_cache, method)
    if input_shape[0] > output_shape[0]:
        raise RuntimeError(f"{method}: input's size 0 > output's size 0")
    if (runtime.rank, runtime.tp_size, runtime.dp_size) != (model.rank, config.def_tp_size, config.def_dp_size):
        raise RuntimeError("model.cpp: check runtime communication setting failed")
    if runtime.pool is None:
        raise RuntimeError("model.cpp: xlite runtime not inited")
    _check_kv_shapes(model, kv_cache)
    num_tokens = sum(batch.lens)
    if not 1 <= num_tokens <= model.max_m:
        place = model.behaviour.token_check
        raise RuntimeError(f"{place}: invalid attnMeta batched tokens({num_tokens}) > maxBatchedTokens({model.max_m})")
    if len(batch.block_tables) < len(batch.lens):
        raise RuntimeError(f"model.cpp: invalid blocktable({len(batch.block_tables)}), expected {len(batch.lens)}")
    for length, cached, table in zip(batch.lens, batch.cached_lens, batch.block_tables, strict=False):
        num_blocks = -(-(length + cached) // config.block_size)
        if len(table) < num_blocks:
            raise RuntimeError(f"model.cpp: block table too small ({len(table)}), expected {num_blocks}")


def _check_kv_lengths(model: RankModel, kv_cache: Sequence[Sequence[Any]], method: str) -> None:
    if len(kv_cache) < model.config.n_layers:
        raise RuntimeError(f"{method}: check kv cache failed!")
    num_tensors = _TENSORS_PER_LAYER[AttnType(model.config.attn_type)]
    for index, layer in enumerate(kv_cache[: model.config.n_layers]):
        if len(layer) != num_tensors:
            raise RuntimeError(f"{method}: check kv cache failed at layer {index}")


def _check_kv_shapes(model: RankModel, kv_cache: Sequence[Sequence[Any]]) -> None:
    """Of the first layer alone (exact: GVirt xlite/csrc/model.cpp, about tag 0.1.0rc11)."""
    config = model.config
    if config.attn_type == AttnType.AttnMHA:
        expected = (config.block_size, max(config.n_kv_heads // config.def_tp_size, 1), config.head_dim)
        if any(tuple(tensor.shape[1:]) != expected for layer in kv_cache[:1] for tensor in layer):
            raise RuntimeError("model.cpp: kv cache's shape not match [block_num, block_size, kv_head_num, head_size]")

"""What decides the size of xlite's tensor pool: model configuration, weights, device, environment."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import Any, Final, Self

from npusim.xlite.tensors import DType

DEFAULT_COMM_OPTIMIZE_LEN: Final = 6144
"""Tokens from which TP collectives are split in two. Exact: GVirt xlite/csrc/runtime.h, tag 0.1.0rc11."""


class AttnType(IntEnum):
    """Kinds of attention, with xlite's own names and numbers."""

    AttnMHA = 0
    AttnMLA = 1
    AttnDSA = 2
    AttnHybrid = 3
    AttnCxA = 4


class ScoringFuncType(IntEnum):
    """Scoring functions of the MoE gate, with xlite's own names and numbers."""

    ScoringFuncSoftmax = 0
    ScoringFuncSigmoid = 1
    ScoringFuncSqrtsoftplus = 2


class QuantKind(Enum):
    """How a linear layer quantises its input: not, with stored scales, or per token while it runs."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def of(
        cls, family: str, weight: DType, *, has_input_scale: bool, has_input_offset: bool, has_deq_scale: bool
    ) -> QuantKind:
        """The kind that xlite reads from a linear's weights: data type, and which of the other tensors are there.

        Grade: exact, GVirt xlite/csrc/base.cpp, tag 0.1.0rc11.

        Raises:
            ValueError: The tensors make no kind. The real text goes on with all their shapes.
        """
        if weight is not DType.INT8:
            return cls.NONE
        match (has_input_scale, has_input_offset, has_deq_scale):
            case (True, True, True):
                return cls.STATIC
            case (False, False, True):
                return cls.DYNAMIC
            case _:
                raise ValueError(f"GetQuantType: {family} gets invalid matmul weights")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """xlite's ``ModelConfig`` with its Python names and its defaults (0.1.0rc11, and what 0.2.0rc0 added).

    Sizes are counts; ``max_m`` is in tokens per rank and step, ``max_seq_len`` and ``block_size`` in tokens.
    Grade: exact, from the published wheels.
    """

    vocab_size: int = 0
    hidden_size: int = 0
    n_layers: int = 0

    attn_type: int = AttnType.AttnMHA
    n_heads: int = 0
    n_kv_heads: int = 1
    head_dim: int = 0
    rope_head_dim: int = 0
    nope_head_dim: int = 0
    v_head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    norm_eps: float = 0.0
    rope_theta: float = 0.0
    softmax_scale: float = 0.0
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    deepstack_num_level: int = 0

    index_head_dim: int = 0
    index_n_heads: int = 0
    index_topk: int = 0
    index_softmax_scale: float = 0.0
    index_rope_interleaved: bool = False

    n_dense_layers: int = 0
    intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    n_act_experts: int = 0
    n_expert_groups: int = 1
    n_limited_groups: int = 1
    moe_intermediate_size: int = 0
    scoring_func: int = ScoringFuncType.ScoringFuncSoftmax
    route_scale: float = 1.0
    norm_topk_prob: bool = False
    gate_captured: bool = True

    weight_nz: bool = False
    experts_weight_transpose: bool = False
    experts_weight_nz: bool = False
    quant_attn_weight_transpose: bool = False
    quant_attn_weight_nz: bool = False

    def_tp_size: int = 0
    def_dp_size: int = 0
    moe_ep_size: int = 0
    moe_tp_size: int = 0

    max_m: int = 0
    max_batch_size: int = 0
    max_seq_len: int = 0
    block_size: int = 0

    attn_output_gate: bool = False
    full_attention_interval: int = 4
    linear_num_k_heads: int = 0
    linear_num_v_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0

    @classmethod
    def from_object(cls, source: object) -> Self:
        """Copy the attributes that ``source`` has under these names; what it lacks keeps its default."""
        known: dict[str, Any] = {
            field.name: getattr(source, field.name) for field in fields(cls) if hasattr(source, field.name)
        }
        if "mrope_section" in known:
            known["mrope_section"] = tuple(known["mrope_section"])
        return cls(**known)


ADDED_IN_0_2: Final = frozenset(
    {
        "attn_output_gate",
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_k_heads",
        "linear_num_v_heads",
        "linear_value_head_dim",
    }
)
"""Fields of :class:`ModelConfig` that came with 0.2.0rc0. Exact: the published wheels."""


@dataclass(frozen=True, kw_only=True)
class WeightFacts:
    """What the weights tell about a rank's tensors: data types, quantisation per family, widths of the FFNs.

    The facts hold for all layers. A model that quantises its layers differently needs the largest of the pools that
    the differing facts give, because no tensor outlives its layer.

    ``mlp_width`` and ``shared_width`` are the rank's own intermediate sizes, in columns of ``mlp_down`` and
    ``se_down``; None stands for an even split over TP. ``experts_quantised`` says that ``re_up_gate`` has another data
    type than the activations, which xlite always quantises per token.
    """

    dtype: DType = DType.BF16
    gate_dtype: DType = DType.BF16
    mha_qkv: QuantKind = QuantKind.NONE
    mla_qkv_a: QuantKind = QuantKind.NONE
    mla_q_b: QuantKind = QuantKind.NONE
    index_q_b: QuantKind = QuantKind.NONE
    attn_out: QuantKind = QuantKind.NONE
    mlp_up_gate: QuantKind = QuantKind.NONE
    mlp_down: QuantKind = QuantKind.NONE
    se_up_gate: QuantKind = QuantKind.NONE
    se_down: QuantKind = QuantKind.NONE
    experts_quantised: bool = False
    mlp_width: int | None = None
    shared_width: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The device as ACL describes it: AI (cube) cores, and devices that this process can count on its node."""

    num_ai_cores: int
    devices_per_node: int

    @property
    def num_vector_cores(self) -> int:
        """Vector cores. Exact for A2 and A3, which have two per AI core."""
        return 2 * self.num_ai_cores


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment variables that change what xlite allocates, as the library reads them.

    ``active_tokens_ratio`` is the raw value of XLITE_ACTIVE_TOKENS_RATIO_PER_EP; the library clamps it to [1/EP, 1].
    The dummy run reads neither of the last three: XLITE_DEVS_PER_NODE, XLITE_ENABLE_GRAPH_COMM, XLITE_MOE_ALLTOALL.
    Grade: exact, GVirt xlite/csrc/runtime.cpp, tag 0.2.0rc0.
    """

    comm_optimize_len: int = DEFAULT_COMM_OPTIMIZE_LEN
    disable_xccl: bool = False
    active_tokens_ratio: float = 1.0
    devs_per_node: int | None = None
    enable_graph_comm: bool = True
    moe_alltoall: bool = False

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str]) -> Self:
        """Read the variables from ``os.environ`` or a mapping like it; unreadable values keep the default."""
        comm_optimize_len = _whole_number(variables.get("XLITE_COMM_OPTIMIZE_LEN", ""))
        return cls(
            comm_optimize_len=DEFAULT_COMM_OPTIMIZE_LEN if comm_optimize_len is None else comm_optimize_len,
            disable_xccl=_is_true(variables.get("XLITE_DISABLE_XCCL")) or _is_true(variables.get("HCCL_DETERMINISTIC")),
            active_tokens_ratio=_finite_number(variables.get("XLITE_ACTIVE_TOKENS_RATIO_PER_EP", ""), 1.0),
            devs_per_node=_whole_number(variables.get("XLITE_DEVS_PER_NODE", "")),
            enable_graph_comm=not _is_false(variables.get("XLITE_ENABLE_GRAPH_COMM")),
            moe_alltoall=_is_true(variables.get("XLITE_MOE_ALLTOALL")),
        )


def _is_true(text: str | None) -> bool:
    return text is not None and text.lower() in {"true", "1", "yes", "on"}


def _is_false(text: str | None) -> bool:
    return text is not None and text.lower() in {"false", "0", "no", "off"}


def _whole_number(text: str) -> int | None:
    """A decimal text as C's ``strtol`` reads it into 32 bits; None if negative or followed by anything."""
    if not re.fullmatch(r"\s*\+?[0-9]+", text):
        return None
    return min(int(text), 2**63 - 1) % 2**32


def _finite_number(text: str, default: float) -> float:
    """A decimal text as C's ``strtod`` reads it; the default if not finite or followed by anything."""
    if not re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return default
    number = float(text)
    return number if math.isfinite(number) else default

"""Device memory that xlite allocates outside its tensor pool. None of it grows after the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from npusim.device.ledger import Grade
from npusim.xlite.config import AttnType
from npusim.xlite.rank_model import RankModel

XCCL_FLAG_WINDOW_BYTES: Final = 2_465_792
XCCL_PARAM_BYTES: Final = 512

_INT32_BYTES: Final = 4
_INT64_BYTES: Final = 8
_SOURCE_020_RC0: Final = "GVirt xlite/csrc at tag 0.2.0rc0"


class When(StrEnum):
    """The call in which xlite allocates."""

    INIT_TENSOR_POOL = "Runtime.init_tensor_pool"
    MODEL_INIT = "Model.init"
    FIRST_FORWARD = "first forward"


@dataclass(frozen=True, slots=True)
class OutsideAllocation:
    """``count`` allocations of ``block_bytes`` each, made in ``when`` and kept."""

    label: str
    when: When
    block_bytes: int
    count: int
    grade: Grade
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes asked for in all, before the driver rounds each block to its pages."""
        return self.block_bytes * self.count


def outside_pool(model: RankModel) -> tuple[OutsideAllocation, ...]:
    """What a rank allocates outside the pool, in the order of the calls and within a call as xlite makes them.

    Not listed: buffers that HCCL keeps for xlite's communicators, the pinned host buffer of the MoE exchange, the
    76,800 bytes that 0.1.0 builds take and free around each norm kernel, and the attention buffers that
    ``get_tensor_pool_size`` takes and frees (as many bytes as those of the first forward).
    """
    at_run_time = model.at_run_time()
    return (*_model_init(at_run_time), *_init_tensor_pool(at_run_time), *_first_forward(at_run_time))


def _model_init(model: RankModel) -> Iterator[OutsideAllocation]:
    config, when, behaviour = model.config, When.MODEL_INIT, model.behaviour
    grade, source = _evidence(model)
    if model.n_moe_layers > 0 or config.attn_type == AttnType.AttnDSA:
        indices = max(config.max_seq_len, config.n_routed_experts, behaviour.min_identity_indices)
        yield OutsideAllocation("identity index table", when, _INT32_BYTES * indices, 1, grade, source)
    if model.n_moe_layers > 0:
        tables_per_layer = 4 if model.weights.experts_quantised else 2
        yield OutsideAllocation(
            "expert pointer tables",
            when,
            _INT64_BYTES * config.n_routed_experts,
            tables_per_layer * model.n_moe_layers,
            grade,
            source,
        )
    yield OutsideAllocation("sync words", when, behaviour.sync_bytes, 1, grade, source)


def _init_tensor_pool(model: RankModel) -> Iterator[OutsideAllocation]:
    grade, source = _evidence(model)
    groups = sum(group.size > 1 and group.uses_xccl for group in (model.tp, model.dp))
    if groups:
        when = When.INIT_TENSOR_POOL
        yield OutsideAllocation("XCCL flag windows", when, XCCL_FLAG_WINDOW_BYTES, groups, grade, source)
        yield OutsideAllocation("XCCL parameter blocks", when, XCCL_PARAM_BYTES, groups, grade, source)


def _first_forward(model: RankModel) -> Iterator[OutsideAllocation]:
    config, when, batch = model.config, When.FIRST_FORWARD, model.config.max_batch_size
    grade, source = _evidence(model)
    if model.behaviour.position_buffer:
        yield OutsideAllocation("positions", when, _INT64_BYTES * model.max_m, 1, grade, source)
    yield OutsideAllocation("slot mapping", when, _INT32_BYTES * model.max_m, 1, grade, source)
    yield OutsideAllocation("lens, cached lens, query starts", when, _INT32_BYTES * batch, 3, grade, source)
    blocks_per_request = -(-config.max_seq_len // config.block_size)
    yield OutsideAllocation("block tables", when, _INT32_BYTES * batch * blocks_per_request, 1, grade, source)
    if model.captures_dp_graphs:
        send, receive = _dp_graph_bytes(model)
        yield OutsideAllocation("DP graph send buffer", when, send, 1, grade, source)
        yield OutsideAllocation("DP graph receive buffer", when, receive, 1, grade, source)


def _dp_graph_bytes(model: RankModel) -> tuple[int, int]:
    """Send and receive bytes, each large enough for the packed all-gather and for the reduce-scatter."""
    config, weights = model.config, model.weights
    gate_dtype = weights.gate_dtype if model.n_moe_layers > 0 else weights.dtype
    hidden_bytes = config.hidden_size * weights.dtype.bits // 8
    packed_bytes = hidden_bytes + config.n_routed_experts * gate_dtype.bits // 8 + config.n_routed_experts // 8
    batch, dp_size = config.max_batch_size, config.def_dp_size
    send = batch * max(packed_bytes, dp_size * hidden_bytes)
    receive = batch * max(dp_size * packed_bytes, hidden_bytes)
    return send, receive


def _evidence(model: RankModel) -> tuple[Grade, str]:
    """0.1.0rc11 and 0.2.0rc0 have public source; the later version was only observed on stand-ins for CANN."""
    if model.behaviour.gathers_sparse_keys:
        return Grade.CALIBRATED, f"{_SOURCE_020_RC0}, corrected by what the 0.2.0rc4 wheel asked of stand-in libraries"
    return Grade.EXACT, f"GVirt xlite/csrc at tag {model.version.removesuffix('.dev210')}"

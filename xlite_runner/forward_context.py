"""What one forward pass needs to know beyond its tensors, and which way mixture-of-experts layers communicate in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from xlite_runner.config import CUDAGraphMode, RunnerConfig

if TYPE_CHECKING:
    import torch

    from xlite_runner.graph_params import GraphParams

MAX_MC2_TOKENS_PER_RANK = 512


class AscendDeviceType(Enum):
    """Device generations that behave differently."""

    A2 = "A2"
    A3 = "A3"
    A5 = "A5"
    _310P = "310P"

    @classmethod
    def of(cls, soc_version: int) -> AscendDeviceType:
        """The generation of the number that ``torch_npu.npu.get_soc_version`` returns.

        Raises:
            RuntimeError: A number that upstream does not know, in its words.
        """
        if 220 <= soc_version <= 225:
            return cls.A2
        if 250 <= soc_version <= 255:
            return cls.A3
        if 200 <= soc_version <= 205:
            return cls._310P
        if soc_version == 260:
            return cls.A5
        raise RuntimeError(f"Can not support soc_version: {soc_version}.")


class MoECommType(Enum):
    """How tokens get to the ranks that hold their experts."""

    ALLGATHER = "allgather"
    """Every rank sees all tokens and sums partial results."""
    MC2 = "mc2"
    """Fused dispatch and combine operators with a communication window; for few tokens."""
    ALLTOALL = "alltoall"
    """Tokens are sent to their experts' ranks and back."""


@dataclass(frozen=True)
class BatchDescriptor:
    """The padded shape of a batch, by which captured graphs are found.

    ``num_reqs`` is None in eager mode; ``uniform`` says that every request brings the tokens of one decode step.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """State of one forward pass.

    Attributes:
        batch_descriptor: Padded shape of the batch.
        attn_metadata: Attention metadata by layer name, or None if attention is not computed (profile run).
        in_profile_run: Whether the memory profile is being taken.
        cudagraph_runtime_mode: NONE, or FULL for a step that is captured or replayed.
        graph_params: Where attention operators are noted while a graph is captured; else None.
        max_tokens_across_dp: Tokens of the data-parallel rank that has most.
        moe_comm_type: How its mixture-of-experts layers communicate; None for a dense model.
        padded_num_tokens: ``max_tokens_across_dp``, padded to a multiple of the tensor-parallel size.
        mc2_mask: Which of the padded tokens are real; None for a dense model.
        cos: Cosines of the batch's positions, [1, tokens, 1, rotary dim]; None if the model's rotary embedding reads
            its own cache.
        sin: The sines.
    """

    batch_descriptor: BatchDescriptor
    attn_metadata: object | None = None
    in_profile_run: bool = False
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    graph_params: GraphParams | None = None
    max_tokens_across_dp: int
    moe_comm_type: MoECommType | None = None
    padded_num_tokens: int
    mc2_mask: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None


def mc2_tokens_capacity(config: RunnerConfig) -> int:
    """Most tokens that the MC2 operators are used for, over all tensor-parallel ranks."""
    max_num_tokens = config.compilation.max_cudagraph_capture_size
    if not max_num_tokens:
        max_num_tokens = config.scheduler.max_num_seqs * config.uniform_decode_query_len
    tp_size = config.parallel.tensor_parallel_size
    return min(-(-max_num_tokens // tp_size), MAX_MC2_TOKENS_PER_RANK) * tp_size


def select_moe_comm_method(num_tokens: int, config: RunnerConfig, device_type: AscendDeviceType) -> MoECommType | None:
    """How mixture-of-experts layers communicate in a forward pass of ``num_tokens`` tokens; None for a dense model."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        return None
    world_size = parallel.world_size_across_dp
    fits_mc2 = num_tokens <= mc2_tokens_capacity(config)
    if not parallel.enable_expert_parallel or parallel.ep_world_size == 1:
        return MoECommType.ALLGATHER
    if device_type is AscendDeviceType.A2:
        few_experts = moe.num_experts // parallel.ep_world_size <= 24
        return MoECommType.MC2 if few_experts and parallel.ep_world_size >= 16 and fits_mc2 else MoECommType.ALLGATHER
    if device_type is AscendDeviceType.A3:
        return MoECommType.MC2 if fits_mc2 else MoECommType.ALLTOALL
    if device_type is AscendDeviceType.A5:
        if fits_mc2 and world_size > 1:
            return MoECommType.MC2
        return MoECommType.ALLGATHER if world_size <= moe.num_experts_per_tok else MoECommType.ALLTOALL
    return MoECommType.ALLGATHER


def create_forward_context(
    config: RunnerConfig,
    device_type: AscendDeviceType,
    batch_descriptor: BatchDescriptor,
    *,
    num_actual_tokens: int | None = None,
    max_tokens_across_dp: int | None = None,
    attn_metadata: object | None = None,
    in_profile_run: bool = False,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    reserved_mc2_mask: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> ForwardContext:
    """The context of one forward pass.

    Args:
        config: The engine's configuration.
        device_type: The device's generation.
        batch_descriptor: Padded shape of the batch.
        num_actual_tokens: Tokens without padding; all if None.
        max_tokens_across_dp: Tokens of the largest data-parallel rank; this rank's if None.
        attn_metadata: See :class:`ForwardContext`.
        in_profile_run: Whether the memory profile is being taken.
        cudagraph_runtime_mode: See :class:`ForwardContext`.
        reserved_mc2_mask: The runner's bool buffer of ``max_num_batched_tokens`` elements, a slice of which becomes the
            mask; None for a dense model.
        cos: See :class:`ForwardContext`.
        sin: See :class:`ForwardContext`.
    """
    num_tokens = batch_descriptor.num_tokens
    max_tokens = num_tokens if max_tokens_across_dp is None else max_tokens_across_dp
    tp_size = config.parallel.tensor_parallel_size
    padded_num_tokens = -(-max_tokens // tp_size) * tp_size
    mc2_mask = None
    if reserved_mc2_mask is not None:
        mc2_mask = reserved_mc2_mask[:padded_num_tokens]
        num_actual_tokens = num_tokens if num_actual_tokens is None else num_actual_tokens
        mc2_mask[:num_actual_tokens] = True
        mc2_mask[num_actual_tokens:] = False
    return ForwardContext(
        batch_descriptor=batch_descriptor,
        attn_metadata=attn_metadata,
        in_profile_run=in_profile_run,
        cudagraph_runtime_mode=cudagraph_runtime_mode,
        max_tokens_across_dp=max_tokens,
        moe_comm_type=select_moe_comm_method(max_tokens, config, device_type),
        padded_num_tokens=padded_num_tokens,
        mc2_mask=mc2_mask,
        cos=cos,
        sin=sin,
    )

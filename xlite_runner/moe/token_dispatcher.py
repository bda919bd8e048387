"""How tokens get to their experts and back: three ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch_npu

from xlite_runner.config import MoeConfig
from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.models.layers import BuildContext

GROUP_LIST_CUMSUM = 0
GROUP_LIST_COUNT = 1


@dataclass(frozen=True)
class MoETokenDispatchInput:
    """What this rank routes, and where to."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    mc2_mask: torch.Tensor | None


CombineMetadata = TypeVar("CombineMetadata")


@dataclass(frozen=True)
class MoETokenDispatchOutput(Generic[CombineMetadata]):
    """Rows sorted by local expert, and how to undo that.

    ``dynamic_scale`` is None or a result that nobody reads but that upstream keeps as long as the rows.
    """

    hidden_states: torch.Tensor
    group_list: torch.Tensor
    group_list_type: int
    combine_metadata: CombineMetadata
    dynamic_scale: torch.Tensor | None = None


class MoETokenDispatcher(ABC, Generic[CombineMetadata]):
    """One way to the experts and back."""

    @abstractmethod
    def token_dispatch(self, dispatch_input: MoETokenDispatchInput) -> MoETokenDispatchOutput[CombineMetadata]:
        """Bring tokens to the ranks that hold their experts."""

    @abstractmethod
    def token_combine(self, hidden_states: torch.Tensor, metadata: CombineMetadata) -> torch.Tensor:
        """Bring the experts' results back and sum them by the routing weights."""


@dataclass(frozen=True)
class MoEAllGatherCombineMetadata:
    """Weights (0 for experts of other ranks) and each row's place."""

    topk_weights: torch.Tensor
    expanded_row_idx: torch.Tensor


class TokenDispatcherWithAllGather(MoETokenDispatcher[MoEAllGatherCombineMetadata]):
    """Every rank computes its own experts' part of every token; nothing is sent.

    The sorted rows have room for all choices of all tokens, whichever rank holds the experts.
    """

    def __init__(self, build: BuildContext, moe: MoeConfig, num_local_experts: int) -> None:
        self.moe = moe
        ep_rank = build.parallel.ep.rank_in_group if num_local_experts < moe.num_experts else 0
        self.active_expert_range = [ep_rank * num_local_experts, (ep_rank + 1) * num_local_experts]

    def token_dispatch(
        self, dispatch_input: MoETokenDispatchInput
    ) -> MoETokenDispatchOutput[MoEAllGatherCombineMetadata]:
        """Sort the rows by expert."""
        hidden_states, topk_ids = dispatch_input.hidden_states, dispatch_input.topk_ids
        topk_weights = dispatch_input.topk_weights
        if dispatch_input.expert_map is not None:
            mask = dispatch_input.expert_map[topk_ids] != -1
            topk_weights = topk_weights * mask
        sorted_hidden_states, expanded_row_idx, expert_tokens, _ = torch.ops._C_ascend.npu_moe_init_routing_custom(
            hidden_states,
            topk_ids,
            scale=None,
            active_num=hidden_states.size(0) * self.moe.num_experts_per_tok,
            expert_num=self.moe.num_experts,
            expert_tokens_num_type=GROUP_LIST_COUNT,
            expert_tokens_num_flag=True,
            active_expert_range=self.active_expert_range,
            quant_mode=-1,
        )
        return MoETokenDispatchOutput(
            hidden_states=sorted_hidden_states,
            group_list=expert_tokens.to(torch.int64),
            group_list_type=GROUP_LIST_COUNT,
            combine_metadata=MoEAllGatherCombineMetadata(topk_weights, expanded_row_idx),
        )

    def token_combine(self, hidden_states: torch.Tensor, metadata: MoEAllGatherCombineMetadata) -> torch.Tensor:
        """Sum of each token's rows, this rank's experts only."""
        combined: torch.Tensor = torch_npu.npu_moe_token_unpermute(
            permuted_tokens=hidden_states,
            sorted_indices=torch.abs(metadata.expanded_row_idx),
            probs=metadata.topk_weights,
        )
        return combined


@dataclass(frozen=True)
class MoEMC2CombineMetadata:
    """What the dispatch operator tells the combine operator, and the routing."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    ep_recv_counts: torch.Tensor
    tp_recv_counts: torch.Tensor
    assist_info_for_combine: torch.Tensor
    expand_scales: torch.Tensor
    mc2_mask: torch.Tensor | None


class TokenDispatcherWithMC2(MoETokenDispatcher[MoEMC2CombineMetadata]):
    """Fused operators that send through a window of the ``mc2`` group's communicator.

    Creates that communicator when built.
    """

    def __init__(self, build: BuildContext, moe: MoeConfig) -> None:
        group = build.parallel.mc2
        group_name = group.hccl_comm_name()
        self.common: dict[str, Any] = {
            "group_ep": group_name,
            "ep_world_size": group.world_size,
            "ep_rank_id": group.rank_in_group,
            "moe_expert_num": moe.num_experts,
            "expert_shard_type": 0,
            "shared_expert_rank_num": 0,
            "global_bs": 0,  # all ranks have the same number of tokens, so a mask says which are real
        }
        if build.device_type in (AscendDeviceType.A3, AscendDeviceType.A5):
            self.common |= {"group_tp": group_name, "tp_world_size": 1, "tp_rank_id": 0}
        self.sends_tp_counts = "group_tp" in self.common
        self.needs_expert_scales = build.device_type is AscendDeviceType.A5

    def token_dispatch(self, dispatch_input: MoETokenDispatchInput) -> MoETokenDispatchOutput[MoEMC2CombineMetadata]:
        """Send tokens; the result has room for everything that could arrive."""
        scales: dict[str, torch.Tensor] = {}
        if self.needs_expert_scales:
            scales["expert_scales"] = dispatch_input.topk_weights.to(torch.float32)
        (
            expand_x,
            dynamic_scale,
            assist_info_for_combine,
            expert_token_nums,
            ep_recv_counts,
            tp_recv_counts,
            expand_scales,
        ) = torch_npu.npu_moe_distribute_dispatch_v2(
            x=dispatch_input.hidden_states,
            expert_ids=dispatch_input.topk_ids,
            expert_token_nums_type=GROUP_LIST_CUMSUM,
            x_active_mask=dispatch_input.mc2_mask,
            scales=None,
            quant_mode=0,
            **scales,
            **self.common,
        )[:7]
        return MoETokenDispatchOutput(
            hidden_states=expand_x,
            group_list=expert_token_nums,
            group_list_type=GROUP_LIST_CUMSUM,
            combine_metadata=MoEMC2CombineMetadata(
                topk_ids=dispatch_input.topk_ids,
                topk_weights=dispatch_input.topk_weights,
                ep_recv_counts=ep_recv_counts,
                tp_recv_counts=tp_recv_counts,
                assist_info_for_combine=assist_info_for_combine,
                expand_scales=expand_scales,
                mc2_mask=dispatch_input.mc2_mask,
            ),
            dynamic_scale=dynamic_scale,
        )

    def token_combine(self, hidden_states: torch.Tensor, metadata: MoEMC2CombineMetadata) -> torch.Tensor:
        """Send results back; sums over each token's experts."""
        tp_counts = {"tp_send_counts": metadata.tp_recv_counts} if self.sends_tp_counts else {}
        combined: torch.Tensor = torch_npu.npu_moe_distribute_combine_v2(
            expand_x=hidden_states,
            expert_ids=metadata.topk_ids,
            expert_scales=metadata.topk_weights.to(torch.float32),
            x_active_mask=metadata.mc2_mask,
            ep_send_counts=metadata.ep_recv_counts,
            expand_scales=metadata.expand_scales,
            assist_info_for_combine=metadata.assist_info_for_combine,
            comm_quant_mode=0,
            **tp_counts,
            **self.common,
        )
        return combined


@dataclass(frozen=True)
class MoEAllToAllCombineMetadata:
    """Rows sent to and received from each rank, the routing, and both permutations."""

    input_splits: list[int]
    output_splits: list[int]
    topk_weights: torch.Tensor
    local_permutation: torch.Tensor
    global_permutation: torch.Tensor | None
    restore_shape: torch.Size


@dataclass(frozen=True)
class _Exchange:
    """Who sends how many rows to whom."""

    input_splits: list[int]
    output_splits: list[int]
    tokens_per_local_expert: torch.Tensor
    local_expert_of_row: torch.Tensor | None


class TokenDispatcherWithAll2AllV(MoETokenDispatcher[MoEAllToAllCombineMetadata]):
    """Rows are sorted by expert, sent to the experts' ranks, sorted again there, and all of that backwards.

    Creates the ``ep`` group's communicator when built.
    """

    def __init__(self, build: BuildContext, moe: MoeConfig, num_local_experts: int) -> None:
        self.group = build.parallel.ep
        self.group.hccl_comm_name()
        self.num_experts = moe.num_experts
        self.num_local_experts = num_local_experts
        self.local_expert_ids: torch.Tensor | None = None
        if num_local_experts > 1:
            ids = [expert % num_local_experts for expert in range(moe.num_experts)]
            self.local_expert_ids = torch.tensor(ids, dtype=torch.int32, device=build.device)

    def token_dispatch(
        self, dispatch_input: MoETokenDispatchInput
    ) -> MoETokenDispatchOutput[MoEAllToAllCombineMetadata]:
        """Send each row to its expert's rank."""
        exchange = self._exchange(dispatch_input.topk_ids)
        send_rows, local_permutation = torch_npu.npu_moe_token_permute(
            tokens=dispatch_input.hidden_states,
            indices=dispatch_input.topk_ids,
            num_out_tokens=dispatch_input.topk_ids.numel(),
        )
        rows = self._all_to_all(send_rows, exchange.output_splits, exchange.input_splits)
        send_rows.untyped_storage().resize_(0)  # the local name still holds the tensor, but no memory any more
        # Received rows live until the sorted ones are complete.
        rows, global_permutation = self._sort_by_expert(rows, exchange.local_expert_of_row)
        return MoETokenDispatchOutput(
            hidden_states=rows,
            group_list=exchange.tokens_per_local_expert,
            group_list_type=GROUP_LIST_COUNT,
            combine_metadata=MoEAllToAllCombineMetadata(
                input_splits=exchange.input_splits,
                output_splits=exchange.output_splits,
                topk_weights=dispatch_input.topk_weights,
                local_permutation=local_permutation,
                global_permutation=global_permutation,
                restore_shape=dispatch_input.hidden_states.shape,
            ),
        )

    def token_combine(self, hidden_states: torch.Tensor, metadata: MoEAllToAllCombineMetadata) -> torch.Tensor:
        """Send each row back to its token's rank."""
        # The experts' results stay with the caller, so the peak of the layer has four tensors of rows: dispatched rows,
        # results, results in sending order and results received.
        if hidden_states.size(0) > 0 and metadata.global_permutation is not None:
            hidden_states = torch_npu.npu_moe_token_unpermute(hidden_states, metadata.global_permutation)
        rows = self._all_to_all(hidden_states, metadata.input_splits, metadata.output_splits)
        hidden_states.untyped_storage().resize_(0)
        combined: torch.Tensor = torch_npu.npu_moe_token_unpermute(
            permuted_tokens=rows,
            sorted_indices=metadata.local_permutation.to(torch.int32),
            probs=metadata.topk_weights,
            restore_shape=metadata.restore_shape,
        )
        return combined

    def _exchange(self, topk_ids: torch.Tensor) -> _Exchange:
        ep_size, ep_rank = self.group.world_size, self.group.rank_in_group
        local_counts = torch.histc(topk_ids, bins=self.num_experts, min=0, max=self.num_experts)
        # Both copies to the host are asynchronous; their numbers are read after the device has been waited for.
        input_splits = local_counts.reshape(ep_size, -1).sum(1).to("cpu", non_blocking=True)
        counts = self._gather_counts(local_counts)
        first_expert = ep_rank * self.num_local_experts
        counts = counts.reshape(ep_size, -1)[:, first_expert : first_expert + self.num_local_experts]
        output_splits = counts.sum(-1).to("cpu", non_blocking=True)
        tokens_per_local_expert = counts.sum(0)
        local_expert_of_row = None
        if self.local_expert_ids is None:
            torch_npu.npu.synchronize()
        else:
            local_expert_of_row = torch.repeat_interleave(self.local_expert_ids, counts.ravel())  # waits
        return _Exchange(input_splits.tolist(), output_splits.tolist(), tokens_per_local_expert, local_expert_of_row)

    def _gather_counts(self, local_counts: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty(
            self.group.world_size * self.num_experts, dtype=local_counts.dtype, device=local_counts.device
        )
        dist.all_gather_single(gathered, local_counts, group=self.group.device_group)
        return gathered

    def _all_to_all(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> torch.Tensor:
        received = rows.new_empty((sum(output_splits), rows.size(1)))
        handle = dist.all_to_all_single(
            received,
            rows.contiguous(),
            output_split_sizes=output_splits,
            input_split_sizes=input_splits,
            group=self.group.device_group,
            async_op=True,
        )
        assert handle is not None
        handle.wait()
        return received

    def _sort_by_expert(
        self, rows: torch.Tensor, local_expert_of_row: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if local_expert_of_row is None:
            return rows, None
        sorted_rows, permutation = torch_npu.npu_moe_token_permute(rows, local_expert_of_row)
        return sorted_rows, permutation

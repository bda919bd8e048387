"""The layer of routed experts."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import nn

from xlite_runner.config import MoeConfig
from xlite_runner.forward_context import ForwardContext, MoECommType
from xlite_runner.models.layers import BuildContext
from xlite_runner.moe.comm_method import FusedExpertsResult, MoECommMethod, make_moe_comm_methods
from xlite_runner.moe.experts_selector import select_experts
from xlite_runner.moe.prepare_finalize import MoEPrepareOutput
from xlite_runner.moe.token_dispatcher import MoETokenDispatchInput


class FusedMoE(nn.Module):
    """This rank's experts (or its part of every expert) and their routing.

    Args:
        build: What the weights are made with.
        moe: The model's experts.
        comm_methods: Shared by all layers; each puts its own there, as upstream does.

    Attributes:
        w13_weight: Gate and up projections, [local experts, hidden, 2 * intermediate] once processed.
        w2_weight: Down projections, [local experts, intermediate, hidden] once processed.
        expert_map: int32, local number of each expert, -1 for those of other ranks; None if this rank has all.
    """

    def __init__(
        self, build: BuildContext, moe: MoeConfig, comm_methods: MutableMapping[MoECommType, MoECommMethod]
    ) -> None:
        super().__init__()
        self.build = build
        self.moe = moe
        self.comm_methods = comm_methods
        self.local_num_experts = moe.num_experts // build.config.parallel.moe_ep_size
        self._create_weights()
        # vllm-ascend's layer has vLLM's make everything, and makes it anew before it lets go of that, part by part.
        self._create_weights()
        comm_methods.update(make_moe_comm_methods(build, moe))

    def _create_weights(self) -> None:
        parallel, hidden_size = self.build.config.parallel, self.build.config.model.hidden_size
        intermediate_size = self.moe.moe_intermediate_size // parallel.moe_tp_size
        self.expert_map = self._make_expert_map() if parallel.moe_ep_size > 1 else None
        self.w13_weight = self.build.weight(self.local_num_experts, 2 * intermediate_size, hidden_size)
        self.w2_weight = self.build.weight(self.local_num_experts, hidden_size, intermediate_size)

    def process_weights_after_loading(self) -> None:
        """Turn [output, input] as in checkpoints into [input, output] as the kernels want, and into their format.

        Both are turned before either is cast, and what was turned lives until the end, as in upstream's frame.
        """
        weights, turned = (self.w13_weight, self.w2_weight), []
        for weight in weights:
            turned.append(weight.data.transpose(1, 2).contiguous())
            weight.data = turned[-1]
        for weight in weights:
            weight.data = self.build.maybe_trans_nz(weight.data)

    def forward(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The experts' weighted sum for each token, the same on every tensor-parallel rank."""
        routed_out = self._forward_impl(hidden_states, router_logits, context)
        if context.moe_comm_type is MoECommType.ALLGATHER:  # the other ways end with complete sums
            routed_out = self.build.parallel.tp.all_reduce(routed_out)
        return routed_out

    def _forward_impl(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        assert context.moe_comm_type is not None
        method = self.comm_methods[context.moe_comm_type]
        prepared = method.prepare_finalize.prepare(hidden_states, router_logits, context)
        result = self._run_experts(method, prepared, force_load_balance=context.in_profile_run)
        return method.prepare_finalize.finalize(result.routed_out, prepared)

    def _run_experts(
        self, method: MoECommMethod, prepared: MoEPrepareOutput, *, force_load_balance: bool
    ) -> FusedExpertsResult:
        topk_weights, topk_ids = select_experts(prepared.router_logits, self.moe)
        if force_load_balance:
            # Dummy tokens are all alike and would all go to the same experts. The random matrix lives until the experts
            # are done, as in upstream.
            random_matrix = torch.rand(
                topk_ids.size(0), self.moe.num_experts, dtype=torch.float32, device=topk_ids.device
            )
            topk_ids = torch.argsort(random_matrix, dim=1)[:, : topk_ids.size(1)].to(topk_ids.dtype)
        dispatch_input = MoETokenDispatchInput(
            prepared.hidden_states, topk_weights, topk_ids, self.expert_map, prepared.mc2_mask
        )
        return method.fused_experts(dispatch_input, self.w13_weight, self.w2_weight)

    def _make_expert_map(self) -> torch.Tensor:
        expert_map = torch.full((self.moe.num_experts,), -1, dtype=torch.int32, device=self.build.device)
        first = self.build.parallel.ep.rank_in_group * self.local_num_experts
        expert_map[first : first + self.local_num_experts] = torch.arange(
            self.local_num_experts, dtype=torch.int32, device=self.build.device
        )
        return expert_map

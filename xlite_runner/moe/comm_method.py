"""The ways of communication of mixture-of-experts layers, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xlite_runner.config import MoeConfig
from xlite_runner.forward_context import MoECommType
from xlite_runner.models.layers import BuildContext
from xlite_runner.moe.mlp import apply_mlp
from xlite_runner.moe.prepare_finalize import (
    PrepareAndFinalize,
    PrepareAndFinalizeWithAll2All,
    PrepareAndFinalizeWithAllGather,
    PrepareAndFinalizeWithMC2,
)
from xlite_runner.moe.token_dispatcher import (
    MoETokenDispatcher,
    MoETokenDispatchInput,
    TokenDispatcherWithAll2AllV,
    TokenDispatcherWithAllGather,
    TokenDispatcherWithMC2,
)


@dataclass(frozen=True)
class FusedExpertsResult:
    """The experts' output and, alive as long as it, the rows of each expert."""

    routed_out: torch.Tensor
    expert_tokens: torch.Tensor


@dataclass(frozen=True)
class MoECommMethod:
    """One way of communication."""

    prepare_finalize: PrepareAndFinalize
    token_dispatcher: MoETokenDispatcher[Any]

    def fused_experts(
        self, dispatch_input: MoETokenDispatchInput, w13: torch.Tensor, w2: torch.Tensor
    ) -> FusedExpertsResult:
        """Tokens to their experts, through them, and back.

        Rows before and after the experts both live until this returns: ``dispatched`` and ``mlp_output`` name them.
        """
        dispatched = self.token_dispatcher.token_dispatch(dispatch_input)
        mlp_output = apply_mlp(dispatched.hidden_states, w13, w2, dispatched.group_list, dispatched.group_list_type)
        routed_out = self.token_dispatcher.token_combine(mlp_output, dispatched.combine_metadata)
        return FusedExpertsResult(routed_out, dispatched.group_list)


def make_moe_comm_methods(build: BuildContext, moe: MoeConfig) -> Mapping[MoECommType, MoECommMethod]:
    """The ways that the parallel configuration allows; a forward pass picks one by its number of tokens.

    With experts spread over ranks this creates the communicators of the ``ep`` and the ``mc2`` group, on every device.
    """
    parallel = build.parallel
    ep_size = build.config.parallel.moe_ep_size
    num_local_experts = moe.num_experts // ep_size
    methods: dict[MoECommType, MoECommMethod] = {}
    if ep_size > 1:
        methods[MoECommType.ALLTOALL] = MoECommMethod(
            PrepareAndFinalizeWithAll2All(parallel), TokenDispatcherWithAll2AllV(build, moe, num_local_experts)
        )
        methods[MoECommType.MC2] = MoECommMethod(
            PrepareAndFinalizeWithMC2(parallel), TokenDispatcherWithMC2(build, moe)
        )
    methods[MoECommType.ALLGATHER] = MoECommMethod(
        PrepareAndFinalizeWithAllGather(parallel), TokenDispatcherWithAllGather(build, moe, num_local_experts)
    )
    return methods

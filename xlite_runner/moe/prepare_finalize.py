"""Which tokens a rank routes to experts, and how every rank gets all of its own tokens back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from xlite_runner.forward_context import ForwardContext
from xlite_runner.parallel_state import ParallelState


@dataclass(frozen=True)
class MoEPrepareOutput:
    """What this rank routes.

    Attributes:
        hidden_states: Its tokens.
        router_logits: Their logits.
        num_tokens: Tokens that :meth:`PrepareAndFinalize.finalize` has to return.
        padded_shape: Shape of this rank's hidden states with padding.
        mc2_mask: Which tokens are real; None where no operator asks.
    """

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    num_tokens: int
    padded_shape: torch.Size
    mc2_mask: torch.Tensor | None = None


class PrepareAndFinalize(ABC):
    """Before and after the experts."""

    def __init__(self, parallel: ParallelState) -> None:
        self.parallel = parallel

    @abstractmethod
    def prepare(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, context: ForwardContext
    ) -> MoEPrepareOutput:
        """From the layer's input to what this rank routes."""

    @abstractmethod
    def finalize(self, hidden_states: torch.Tensor, prepared: MoEPrepareOutput) -> torch.Tensor:
        """From what the experts returned to the layer's output."""


class PrepareAndFinalizeWithAll2All(PrepareAndFinalize):
    """Each tensor-parallel rank routes its share of the tokens; afterwards all shares are gathered."""

    def prepare(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, context: ForwardContext
    ) -> MoEPrepareOutput:
        """A view of this rank's share; a copy only if there are fewer tokens than ranks."""
        num_tokens = hidden_states.size(0)
        target = self._padded_num_tokens(num_tokens, context)
        if target > num_tokens:
            hidden_states = functional.pad(hidden_states, (0, 0, 0, target - num_tokens))
            router_logits = functional.pad(router_logits, (0, 0, 0, target - num_tokens))
        return MoEPrepareOutput(
            hidden_states=self._share(hidden_states),
            router_logits=self._share(router_logits),
            num_tokens=num_tokens,
            padded_shape=hidden_states.shape,
            mc2_mask=self._mask(context),
        )

    def finalize(self, hidden_states: torch.Tensor, prepared: MoEPrepareOutput) -> torch.Tensor:
        """All shares in one new tensor."""
        tp = self.parallel.tp
        if tp.world_size > 1:
            gathered = torch.empty(prepared.padded_shape, dtype=hidden_states.dtype, device=hidden_states.device)
            shares = list(torch.tensor_split(gathered, tp.world_size, dim=0))
            dist.all_gather(shares, hidden_states, group=tp.device_group)
            hidden_states = gathered
        return hidden_states[: prepared.num_tokens] if prepared.num_tokens < hidden_states.size(0) else hidden_states

    def _padded_num_tokens(self, num_tokens: int, context: ForwardContext) -> int:
        del context
        return max(num_tokens, self.parallel.tp.world_size)  # shares may be uneven, none may be empty

    def _mask(self, context: ForwardContext) -> torch.Tensor | None:
        del context
        return None

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        tp = self.parallel.tp
        return torch.tensor_split(tensor, tp.world_size, dim=0)[tp.rank_in_group]


class PrepareAndFinalizeWithMC2(PrepareAndFinalizeWithAll2All):
    """The same with even shares and a mask of the real tokens."""

    def _padded_num_tokens(self, num_tokens: int, context: ForwardContext) -> int:
        return max(num_tokens, context.padded_num_tokens)

    def _mask(self, context: ForwardContext) -> torch.Tensor | None:
        assert context.mc2_mask is not None
        return self._share(context.mc2_mask)


class PrepareAndFinalizeWithAllGather(PrepareAndFinalize):
    """Every rank sees the tokens of all data-parallel ranks; results are summed over them.

    The sum over the tensor-parallel group is left to the layer.
    """

    def prepare(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, context: ForwardContext
    ) -> MoEPrepareOutput:
        """All tokens: the input itself without data parallelism."""
        num_tokens, dp = hidden_states.size(0), self.parallel.dp
        padding = context.max_tokens_across_dp - num_tokens
        if dp.world_size > 1 and padding > 0:
            hidden_states = functional.pad(hidden_states, (0, 0, 0, padding))
            router_logits = functional.pad(router_logits, (0, 0, 0, padding))
        hidden_states = dp.all_gather(hidden_states, 0)
        router_logits = dp.all_gather(router_logits, 0)
        return MoEPrepareOutput(hidden_states, router_logits, num_tokens, hidden_states.shape)

    def finalize(self, hidden_states: torch.Tensor, prepared: MoEPrepareOutput) -> torch.Tensor:
        """This rank's own tokens."""
        hidden_states = self.parallel.dp.reduce_scatter(hidden_states)
        return hidden_states[: prepared.num_tokens] if prepared.num_tokens < hidden_states.size(0) else hidden_states

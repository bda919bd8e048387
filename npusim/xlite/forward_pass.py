"""One forward pass on one rank: its batch, its pool, and the hidden states that collectives work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

from npusim.errors import UnmodelledCallError
from npusim.xlite.arena import round_up
from npusim.xlite.config import ModelConfig
from npusim.xlite.rank_model import RankModel
from npusim.xlite.tensors import DType, Tensor, TensorPool

MAX_KV_TILE: Final = 8192
"""Longest stretch of keys that attention takes at once. Exact: GVirt xlite/csrc/auto_tuner.h."""

QUERY_TILE: Final = 128
"""Queries that a core takes at once. Exact: GVirt xlite/csrc/kernels/kernel_param.h."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The batch of one pass.

    ``context`` is that of the longest request in whole KV blocks, ``padded_tokens`` the rows that all DP ranks pad
    theirs to (the dummy run pads none), ``kv_tile`` the stretch of keys that the auto-tuner picked (the dummy run's is
    the longest). All in tokens.
    """

    num_tokens: int
    num_requests: int
    context: int
    padded_tokens: int
    kv_tile: int = MAX_KV_TILE

    @classmethod
    def of(cls, model: RankModel, lens: Sequence[int], cached_lens: Sequence[int]) -> Self:
        """Check a batch as xlite does before attention.

        Raises:
            RuntimeError: xlite's own text, for a batch of no tokens or of more than ``max_m``.
        """
        num_tokens = sum(lens)
        if not 0 < num_tokens <= model.max_m:
            raise RuntimeError(
                f"{model.behaviour.token_check}: invalid attnMeta batched tokens({num_tokens}) > "
                f"maxBatchedTokens({model.max_m})"
            )
        longest = max(map(sum, zip(lens, cached_lens, strict=True)))
        return cls(
            num_tokens=num_tokens,
            num_requests=len(lens),
            context=round_up(longest, model.config.block_size),
            padded_tokens=num_tokens,
        )


class Take(Protocol):
    """Takes a tensor of a shape from the pool; of the activations' type unless another is given."""

    def __call__(self, *shape: int, dtype: DType = ...) -> Tensor:
        """The tensor, or xlite's ``RuntimeError`` when the pool is full."""


class ForwardPass:
    """What the functions of the forward hand to each other.

    A pool without a capacity makes it a dummy pass. A real one wants the model :meth:`RankModel.at_run_time`.

    Attributes:
        splits_collectives: Communication-optimised path: reduce-scatter and all-gather stand for each all-reduce.
        hidden_pad: The hidden states with rows for every TP rank, in that path.
        hidden_slice: This rank's rows of them.
        dp_in_graph: DP collectives replay captured graphs over buffers outside the pool; never so in a dummy run.

    Raises:
        UnmodelledCallError: XLITE_MOE_ALLTOALL asks a real pass for the exchange whose sizes depend on the tokens.
    """

    hidden_pad: Tensor
    hidden_slice: Tensor

    def __init__(self, model: RankModel, pool: TensorPool, step: Step) -> None:
        self.model: Final = model
        self.pool: Final = pool
        self.step: Final = step
        self.put: Final = pool.put
        environment = model.environment
        self.splits_collectives: Final = model.tp.size > 1 and step.num_tokens >= environment.comm_optimize_len
        is_dummy = pool.arena.capacity_bytes is None
        if environment.moe_alltoall and model.n_moe_layers > 0 and not is_dummy:
            raise UnmodelledCallError("xlite with XLITE_MOE_ALLTOALL is not modelled beyond the size of its pool")
        self.dp_in_graph: Final = (
            not is_dummy and model.captures_dp_graphs and step.padded_tokens <= model.config.max_batch_size
        )

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.model.config

    def taker(self, function: str) -> Take:
        """What one function of xlite takes its tensors with."""
        activations = self.model.weights.dtype

        def take(*shape: int, dtype: DType = activations) -> Tensor:
            return self.pool.get(shape, dtype, function)

        return take

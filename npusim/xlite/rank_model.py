"""A model as one rank of xlite sees it: local sizes, communication groups, what runs here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Self

from npusim.errors import UnmodelledCallError
from npusim.xlite.arena import round_up
from npusim.xlite.config import DeviceFacts, Environment, ModelConfig, WeightFacts
from npusim.xlite.versions import DEFAULT_VERSION, Behaviour, behaviour_of

XCCL_MAX_RANKS: Final = 32
"""Ranks that XCCL can join. Exact: GVirt xlite/csrc/ccl.h."""

ACTIVE_TOKENS_RATIO_MIN_TOKENS: Final = 1024
"""Tokens over all DP ranks from which the ratio per EP rank applies. Exact: golden configurations, and 0.2.0rc0."""


@dataclass(frozen=True, slots=True)
class CommGroup:
    """A group of ranks, and whether XCCL (copies between pools) serves it rather than HCCL."""

    size: int
    uses_xccl: bool


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """Everything that decides what ``rank`` allocates; the settings are those that ``Model.init`` would copy."""

    config: ModelConfig
    device: DeviceFacts
    weights: WeightFacts = field(default_factory=WeightFacts)
    environment: Environment = field(default_factory=Environment)
    version: str = DEFAULT_VERSION
    rank: int = 0

    def __post_init__(self) -> None:
        divisors = ["def_tp_size", "def_dp_size", "block_size"]
        if self.n_moe_layers > 0:
            divisors += ["moe_ep_size", "moe_tp_size"]
        for name in divisors:
            if (value := getattr(self.config, name)) < 1:
                raise UnmodelledCallError(f"xlite ModelConfig.{name} is {value}, but xlite divides by it: 1 or more")

    @cached_property
    def behaviour(self) -> Behaviour:
        """How the imitated version of xlite allocates."""
        return behaviour_of(self.version)

    @property
    def max_m(self) -> int:
        """Most tokens of a step, padded as the version pads them."""
        return round_up(self.config.max_m, self.config.def_tp_size) if self.behaviour.pads_max_m else self.config.max_m

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.config.n_layers - self.config.n_dense_layers

    @property
    def q_heads(self) -> int:
        """Query heads of this rank."""
        return self.config.n_heads // self.config.def_tp_size

    @property
    def kv_heads(self) -> int:
        """Key and value heads of this rank; replicated where there are fewer than ranks."""
        return max(self.config.n_kv_heads // self.config.def_tp_size, 1)

    @property
    def mlp_width(self) -> int:
        """Intermediate size of a dense layer on this rank."""
        if self.weights.mlp_width is not None:
            return self.weights.mlp_width
        return self.config.intermediate_size // self.config.def_tp_size

    @property
    def shared_width(self) -> int:
        """Intermediate size of the shared experts on this rank."""
        if self.weights.shared_width is not None:
            return self.weights.shared_width
        return self.config.moe_intermediate_size * self.config.n_shared_experts // self.config.def_tp_size

    @property
    def runs_shared_experts(self) -> bool:
        """Whether this rank computes shared experts.

        A width equal to that of one routed expert counts as unsplit, and unsplit ones run on the first TP rank only.
        """
        unsplit = self.shared_width == self.config.moe_intermediate_size
        return self.config.n_shared_experts > 0 and not (unsplit and self.rank % self.config.def_tp_size)

    @cached_property
    def tp(self) -> CommGroup:
        """The tensor-parallel group."""
        size, num_ranks = self.config.def_tp_size, self.config.def_tp_size * self.config.def_dp_size
        return CommGroup(size, self._xccl_reaches(size if self.behaviour.xccl_per_group else num_ranks))

    @cached_property
    def dp(self) -> CommGroup:
        """The data-parallel group."""
        return CommGroup(self.config.def_dp_size, self._xccl_reaches(self.config.def_tp_size * self.config.def_dp_size))

    def _xccl_reaches(self, num_ranks: int) -> bool:
        too_many = self.config.def_tp_size * self.config.def_dp_size > XCCL_MAX_RANKS
        return not too_many and num_ranks <= self.device.devices_per_node and not self.environment.disable_xccl

    @property
    def captures_dp_graphs(self) -> bool:
        """Whether the real runtime captures its DP collectives as graphs at the first forward."""
        wanted = self.behaviour.graph_comm and self.environment.enable_graph_comm
        return wanted and self.dp.size > 1 and not self.dp.uses_xccl

    def expert_rows(self, num_tokens: int) -> int:
        """Rows kept for this rank's experts when all DP ranks together bring ``num_tokens`` tokens."""
        rows = num_tokens * self.config.n_act_experts
        if not self.behaviour.reads_active_tokens_ratio or num_tokens < ACTIVE_TOKENS_RATIO_MIN_TOKENS:
            return rows
        return int(rows * min(max(self.environment.active_tokens_ratio, 1 / self.config.moe_ep_size), 1.0))

    def at_run_time(self) -> Self:
        """The model as the real runtime sees it, which lets XLITE_DEVS_PER_NODE replace the count of devices."""
        if self.environment.devs_per_node is None:
            return self
        return replace(self, device=replace(self.device, devices_per_node=self.environment.devs_per_node))

    def shortened(self) -> Self:
        """The same model with at most one dense and one MoE layer: every further one needs the same tensors again."""
        dense = min(self.config.n_dense_layers, 1)
        moe = min(self.n_moe_layers, 1)
        return replace(self, config=replace(self.config, n_layers=dense + moe, n_dense_layers=dense))

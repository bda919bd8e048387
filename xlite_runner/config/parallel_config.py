"""How the model is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over devices.

    Ranks count tensor-parallel fastest, then pipeline, then data parallel.

    Attributes:
        data_parallel_size: Replicas that have collectives in common, as those of a mixture of experts do.
        num_independent_replicas: Replicas of a dense model, each of which upstream runs as if it were the only one.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    num_independent_replicas: int = 1
    enable_expert_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        """Devices of all replicas that have collectives in common."""
        return self.world_size * self.data_parallel_size

    @property
    def num_replicas(self) -> int:
        """All replicas; each has its own scheduler and its own size of the KV cache."""
        return self.data_parallel_size * self.num_independent_replicas

    @property
    def num_ranks(self) -> int:
        """Devices of all replicas together."""
        return self.world_size * self.num_replicas

    @property
    def ep_world_size(self) -> int:
        """Ranks of the expert-parallel group, which exists whether or not experts are spread over it."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def moe_ep_size(self) -> int:
        """Ranks over which whole experts are spread."""
        return self.ep_world_size if self.enable_expert_parallel else 1

    @property
    def moe_tp_size(self) -> int:
        """Ranks over which every single expert is split."""
        return 1 if self.enable_expert_parallel else self.ep_world_size

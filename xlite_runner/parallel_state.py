"""The process groups of one rank.

Upstream keeps them in module globals; here they are one object that is handed down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch_npu

from xlite_runner.config import ParallelConfig

DEFAULT_BUFFER_SIZE_MB = 200
MIN_DP_BUFFER_SIZE_MB = 50


@dataclass(frozen=True)
class GroupSpec:
    """One kind of group before it exists.

    Attributes:
        name: Upstream's name, which also goes into the HCCL configuration.
        rank_lists: The ranks of each group of this kind; every rank is in exactly one.
        buffer_size_mb: ``hccl_buffer_size``; None leaves it to ``HCCL_BUFFSIZE``.
    """

    name: str
    rank_lists: tuple[tuple[int, ...], ...]
    buffer_size_mb: int | None


def group_specs(parallel_config: ParallelConfig, *, is_moe: bool) -> tuple[GroupSpec, ...]:
    """All groups, in the order in which every rank has to create them (creation is collective).

    Ranks count tensor-parallel fastest, then pipeline, then data parallel. Order, ranks and buffer sizes are those of
    vllm-ascend 0.22.1rc1 and 0.23.0. A dense model has no ``ep`` group, but an ``mc2`` group all the same. Independent
    replicas have groups of their own of every kind, ``world`` included.
    """
    tp_size = parallel_config.tensor_parallel_size
    pp_size = parallel_config.pipeline_parallel_size
    dp_size = parallel_config.data_parallel_size
    tp, pp, dp = range(tp_size), range(pp_size), range(dp_size)
    num_ranks, world_size = parallel_config.num_ranks, parallel_config.world_size_across_dp

    def rank(d: int, p: int, t: int) -> int:
        return (d * pp_size + p) * tp_size + t

    def groups(name: str, rank_lists: Iterable[Iterable[int]], buffer_size_mb: int | None) -> GroupSpec:
        """Groups like those of the first world in each of them."""
        firsts, lists = range(0, num_ranks, world_size), [tuple(ranks) for ranks in rank_lists]
        every = tuple(tuple(first + rank for rank in ranks) for first in firsts for ranks in lists)
        return GroupSpec(name, every, buffer_size_mb)

    singles = [(r,) for r in range(world_size)]
    expert_parallel = [[rank(d, p, t) for d in dp for t in tp] for p in pp]
    dp_buffer_size_mb = max(-(-4 * (dp_size + 1) // (1 << 20)), MIN_DP_BUFFER_SIZE_MB)
    specs = [
        groups("world", [range(world_size)], DEFAULT_BUFFER_SIZE_MB),
        groups("tp", ([rank(d, p, t) for t in tp] for d in dp for p in pp), DEFAULT_BUFFER_SIZE_MB),
        groups("dcp", singles, DEFAULT_BUFFER_SIZE_MB),
        groups("pcp", singles, DEFAULT_BUFFER_SIZE_MB),
        groups("pp", ([rank(d, p, t) for p in pp] for d in dp for t in tp), DEFAULT_BUFFER_SIZE_MB),
        groups("dp", ([rank(d, p, t) for d in dp] for t in tp for p in pp), dp_buffer_size_mb),
    ]
    if is_moe:
        specs.append(groups("ep", expert_parallel, DEFAULT_BUFFER_SIZE_MB))
    # The MC2 operators size their window by HCCL_BUFFSIZE alone, so this group must not have a size of its own.
    specs.append(groups("mc2", expert_parallel, None))
    return tuple(specs)


@dataclass(frozen=True)
class GroupCoordinator:
    """One group that this rank belongs to, and the collectives on it as upstream performs them.

    With a single rank every collective returns its input.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.rank)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate all ranks' tensors along ``dim``.

        Away from dimension 0 this takes the gathered size twice: gathered along dimension 0, then copied.
        """
        if self.world_size == 1:
            return tensor
        dim %= tensor.dim()
        size = tensor.size()
        gathered = torch.empty((self.world_size * size[0], *size[1:]), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather_single(gathered, tensor, group=self.device_group)
        gathered = gathered.reshape(self.world_size, *size).movedim(0, dim)
        return gathered.reshape(*size[:dim], self.world_size * size[dim], *size[dim + 1 :])

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group and keep this rank's part of dimension 0."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        size = (tensor.size(0) // self.world_size, *tensor.size()[1:])
        scattered = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        dist.reduce_scatter_single(scattered, tensor, group=self.device_group)
        return scattered

    def hccl_comm_name(self) -> str:
        """HCCL's name of the communicator, which is created by this call if no collective did."""
        backend = self.device_group._get_backend(torch.device("npu"))
        name: str = backend.get_hccl_comm_name(self.rank_in_group)  # type: ignore[attr-defined]
        return name


@dataclass(frozen=True)
class ParallelState:
    """One rank's place in all groups. ``local_rank`` is the index of its device.

    ``dp_cpu_group`` has the ranks of the data-parallel group, and is for tensors on the host; None for a lone replica.
    """

    rank: int
    local_rank: int
    groups: Mapping[str, GroupCoordinator]
    dp_cpu_group: dist.ProcessGroup | None = None

    @property
    def world(self) -> GroupCoordinator:
        """All ranks that this one can have collectives with."""
        return self.groups["world"]

    @property
    def tp(self) -> GroupCoordinator:
        """The tensor-parallel group."""
        return self.groups["tp"]

    @property
    def dp(self) -> GroupCoordinator:
        """The data-parallel group."""
        return self.groups["dp"]

    @property
    def ep(self) -> GroupCoordinator:
        """The expert-parallel group; only mixture-of-experts models have one."""
        return self.groups["ep"]

    @property
    def mc2(self) -> GroupCoordinator:
        """The group whose communicator the fused dispatch and combine operators use."""
        return self.groups["mc2"]


def initialize_parallel_state(
    parallel_config: ParallelConfig, rank: int, local_rank: int, *, is_moe: bool
) -> ParallelState:
    """Create all process groups.

    Every rank calls this once, after ``torch.distributed.init_process_group("hccl", ...)``. No HCCL communicator comes
    into being here; that happens at a group's first collective or :meth:`GroupCoordinator.hccl_comm_name`.
    """
    groups: dict[str, GroupCoordinator] = {}
    dp_cpu_group = None
    for spec in group_specs(parallel_config, is_moe=is_moe):
        for ranks in spec.rank_lists:
            device_group = dist.new_group(list(ranks), backend="hccl", pg_options=_hccl_options(spec))
            # Upstream gives every group a twin on the host; only this one's is used here.
            cpu_group = dist.new_group(list(ranks), backend="gloo") if spec.name == "dp" and len(ranks) > 1 else None
            if rank in ranks:
                groups[spec.name] = GroupCoordinator(spec.name, ranks, rank, device_group)
                dp_cpu_group = cpu_group or dp_cpu_group
    return ParallelState(rank, local_rank, groups, dp_cpu_group)


def _hccl_options(spec: GroupSpec) -> object:
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    size = {} if spec.buffer_size_mb is None else {"hccl_buffer_size": spec.buffer_size_mb}
    options.hccl_config = {**size, "group_name": spec.name}
    return options

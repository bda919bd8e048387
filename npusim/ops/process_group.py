"""The ``hccl`` process group: torch.distributed's collectives between the ranks of one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import Tensor

from npusim.hccl.communicator import Communicator
from npusim.hccl.ranks import Ranks
from npusim.torch_backend.registration import has_platform, platform
from npusim.torch_backend.tensors import new_like, runtime_of

Payload = tuple[list[Tensor], list[Tensor]]
"""One rank's inputs and outputs."""

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "RedOpType.SUM": lambda stacked: stacked.sum(0),
    "RedOpType.MAX": lambda stacked: stacked.amax(0),
    "RedOpType.MIN": lambda stacked: stacked.amin(0),
    "RedOpType.PRODUCT": lambda stacked: stacked.prod(0),
}


def _reduce(op: Any, parts: Sequence[Tensor]) -> Tensor:
    return _REDUCE[str(op.op)](torch.stack(list(parts))).to(parts[0].dtype)


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class HcclOptions(dist.ProcessGroup.Options if hasattr(dist.ProcessGroup, "Options") else object):  # type: ignore[misc]
    """``ProcessGroupHCCL.Options``.

    Attributes:
        hccl_config: ``hccl_buffer_size`` in megabytes, ``group_name``.
    """

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.hccl_config: dict[str, Any] = {}


class SimulatedProcessGroup(dist.ProcessGroup):
    """A group of ranks that meet in one process.

    On device tensors it is an HCCL communicator, created at the first collective or by :meth:`get_hccl_comm_name`, whose
    buffers are taken at its first operation. On host tensors it stands in for gloo and takes nothing.

    Args:
        ranks: Lockstep of this process' ranks.
        name: torch's name of the group, the same on all its ranks.
        group_rank: This rank's number in the group.
        global_ranks: The group's ranks in the world.
        buffer_mb: HCCL buffer per direction in megabytes; None for the environment's.
        label: The group's name in reports.
    """

    def __init__(
        self, ranks: Ranks, name: str, group_rank: int, global_ranks: Sequence[int], buffer_mb: int | None, label: str
    ) -> None:
        super().__init__(group_rank, len(global_ranks))
        self._ranks = ranks
        self._name = name
        self._label = label
        self._group_rank = group_rank
        self._size = len(global_ranks)
        self._buffer_mb = buffer_mb
        self._communicator: Communicator | None = None
        self._num_collectives = 0

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """torch's name of the backend."""
        return "hccl"

    @property
    def pg_name(self) -> str:
        """torch's name of the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        del desc

    def _get_backend(self, device: torch.device) -> SimulatedProcessGroup:
        del device
        return self

    def get_hccl_comm_name(self, rank: int) -> str:
        """The communicator's name for operators that communicate themselves; creates it, without buffers."""
        del rank
        self.communicator()
        return self._name

    def communicator(self) -> Communicator:
        """The HCCL communicator on the calling rank's device."""
        if self._communicator is None:
            active = platform()
            runtime = active.runtimes[active.current_device()]
            self._communicator = runtime.hccl.communicator(self._label, self._size, self._buffer_mb)
            runtime.communicators[self._name] = self._communicator
        return self._communicator

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Sum (or other reduction) over ranks, in place."""
        self._collective(("allreduce", str(opts.reduceOp.op)), tensors, tensors, lambda parts: _reduce(opts.reduceOp, parts))
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """The root's tensor, in place."""
        root = opts.rootRank
        self._collective(("broadcast", root), tensors, tensors, lambda parts: parts[root])
        return _done(tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """All ranks' inputs, one after another."""
        del opts
        shape = output.shape
        self._collective("allgather_base", [input], [output], lambda parts: torch.cat([p.flatten() for p in parts]).view(shape))
        return _done(output)

    _allgather_base = all_gather_single

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """All ranks' inputs in a list: through one flat tensor, which is then copied out (exact: golden records)."""
        del opts
        outputs, part = output_lists[0], inputs[0]
        if part.device.type != "npu":
            self._collective("allgather", inputs, outputs, None)
            return _done(output_lists)
        flat = new_like(part, (self._size, *part.shape))
        self._collective("allgather", inputs, [flat], torch.stack)
        for index, output in enumerate(outputs):
            output.copy_(flat[index])
        return _done(output_lists)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:  # noqa: A002
        """Each rank's share of the sum over ranks."""
        me, size = self._group_rank, self._size

        def share(parts: list[Tensor], rank: int = me) -> Tensor:
            return _reduce(opts.reduceOp, parts).chunk(size)[rank]

        self._collective(("reduce_scatter", str(opts.reduceOp.op)), [input], [output], share, per_rank=True)
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None  # noqa: A002
    ) -> Any:
        """Rows to every rank, rows from every rank; even shares unless split sizes are given."""
        del opts
        sends = list(input_splits) or [input.shape[0] // self._size] * self._size
        receives = list(output_splits) or [output.shape[0] // self._size] * self._size
        for name, splits, tensor in (("input", sends, input), ("output", receives, output)):
            if sum(splits) != (tensor.shape[0] if tensor.dim() else 0):
                raise ValueError(f"Split sizes doesn't match total dim 0 size: {name} {splits}, {tuple(tensor.shape)}")
        self._exchange(output, input, sends, receives)
        return _done(output)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; takes a byte and a word on the device while it waits (exact: golden records)."""
        del opts
        self._collective("barrier", [], [], None)
        return _done(None)

    def _meet(self, operation: Hashable, payload: Any, finish: Callable[[list[Any], Sequence[int]], None]) -> None:
        self._num_collectives += 1
        key = (self._name, self._num_collectives)
        self._ranks.meet(key, self._group_rank, self._size, operation, payload, finish)

    def _operate(self, tensors: Sequence[Tensor]) -> bool:
        """Check the tensors, open the communicator; whether they are on a device."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise RuntimeError("Tensors must be contiguous")
        on_device = bool(tensors) and tensors[0].device.type == "npu"
        if on_device:
            self.communicator().operate()
            runtime = runtime_of(tensors[0].device)
            runtime.card.launch("hccl", runtime.current_stream())
        return on_device

    def _collective(
        self,
        operation: Hashable,
        inputs: list[Tensor],
        outputs: list[Tensor],
        combine: Callable[..., Tensor] | None,
        *,
        per_rank: bool = False,
    ) -> None:
        on_device = self._operate([*inputs, *outputs])

        def finish(payloads: list[Payload], receivers: Sequence[int]) -> None:
            if combine is None and not outputs:
                return
            sources = [source for part, _ in payloads for source in part]
            targets = [target for rank in receivers for target in payloads[rank][1]]

            def compute(*parts: Tensor) -> list[Tensor]:
                if combine is None:
                    return [part for _ in receivers for part in parts]
                if per_rank:
                    return [combine(list(parts), rank) for rank in receivers]
                return [combine(list(parts))] * len(receivers)

            if on_device:
                platform().values.update(targets, sources, compute)
            else:
                for target, result in zip(targets, compute(*[source.clone() for source in sources]), strict=True):
                    target.copy_(result)

        self._meet(operation, (inputs, outputs), finish)

    def _exchange(self, output: Tensor, source: Tensor, sends: list[int], receives: list[int]) -> None:
        on_device = self._operate([source, output])

        def finish(payloads: list[tuple[Tensor, Tensor, list[int], list[int]]], receivers: Sequence[int]) -> None:
            for receiver in receivers:
                expected = payloads[receiver][3]
                offered = [payload[2][receiver] for payload in payloads]
                if offered != expected:
                    raise RuntimeError(f"rank {receiver} expects {expected} rows of all_to_all on {self._label}, gets {offered}")

            splits = [payload[2] for payload in payloads]  # not the payloads: a result that nobody reads holds no tensors

            def compute(*parts: Tensor) -> list[Tensor]:
                chunks = [part.split(shares) for part, shares in zip(parts, splits, strict=True)]
                return [torch.cat([chunk[receiver] for chunk in chunks]) for receiver in receivers]

            targets, sources = [payloads[receiver][0] for receiver in receivers], [payload[1] for payload in payloads]
            if on_device:
                platform().values.update(targets, sources, compute)
            else:
                for target, result in zip(targets, compute(*sources), strict=True):
                    target.copy_(result)

        self._meet("alltoall_base", (output, source, sends, receives), finish)


def is_hccl_available() -> bool:
    """``torch.distributed.is_hccl_available``, which torch_npu adds."""
    return True


def register_backend() -> None:
    """Make ``hccl`` a backend of torch.distributed, and its process groups a matter of each rank."""
    if "HCCL" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
    dist.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]
    _separate_ranks()


def _create(options: Any, hccl_options: HcclOptions | None) -> SimulatedProcessGroup:
    config = hccl_options.hccl_config if hccl_options is not None else {}
    return SimulatedProcessGroup(
        platform().ranks,
        str(options.group_id),
        options.group_rank,
        options.global_ranks_in_group or range(options.group_size),
        config.get("hccl_buffer_size"),
        config.get("group_name") or str(options.group_id),
    )


class _RankState:
    """torch.distributed's registry of process groups, for one rank."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []


class _RankRegistries:
    """Stands where torch keeps that registry: in a simulated world each rank has its own, else torch's is used."""

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def _state(self) -> Any:
        if not has_platform():
            return self._original
        ranks = platform().ranks
        return ranks.attached.setdefault(("torch.distributed", ranks.current), _RankState())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state(), name, value)


def _separate_ranks() -> None:
    """Let several ranks of one process each have torch.distributed for themselves.

    torch's C++ registry of groups by name, which serves functional collectives only, has one entry per name and process;
    simulated groups stay out of it.
    """
    from torch.distributed import distributed_c10d

    register, unregister = distributed_c10d._register_process_group, distributed_c10d._unregister_process_group
    new_process_group = distributed_c10d._new_process_group_helper

    def register_process_group(name: str, group: Any) -> None:
        if not isinstance(group, SimulatedProcessGroup):
            register(name, group)

    def unregister_process_group(name: str) -> None:
        if not has_platform():
            unregister(name)

    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        """Gloo groups of a simulated world are simulated: real ones would wait for ranks that have no turn."""
        position = 3
        is_gloo = has_platform() and str(args[position]) == dist.Backend.GLOO
        if not is_gloo:
            return new_process_group(*args, **kwargs)
        group, store = new_process_group(*args[:position], dist.Backend("hccl"), *args[position + 1 :], **kwargs)
        if group in distributed_c10d._world.pg_map:
            distributed_c10d._world.pg_map[group] = (dist.Backend(dist.Backend.GLOO), store)
        return group, store

    distributed_c10d._new_process_group_helper = new_process_group_helper
    distributed_c10d._world = _RankRegistries(distributed_c10d._world)  # type: ignore[assignment]
    distributed_c10d._register_process_group = register_process_group  # type: ignore[assignment]
    distributed_c10d._unregister_process_group = unregister_process_group  # type: ignore[assignment]

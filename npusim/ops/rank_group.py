"""A group of simulated ranks that meet in collectives, each with its HCCL communicator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from npusim.device.cost import HOST_COLLECTIVE_NS
from npusim.device.hbm import OutOfHbmError
from npusim.hccl.communicator import Communicator
from npusim.hccl.ranks import Arrival, Ranks
from npusim.ops.hccl_rules import INVALID_TYPE, check_wait
from npusim.ops.parts import Part, update
from npusim.ops.refusal import refusal
from npusim.ops.work import bytes_of
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.tensors import runtime_of

Parts = list[list[Tensor]]
"""Each rank's inputs on the host, by group rank."""
Combine = Callable[[Parts, Sequence[int]], list[Tensor]]
"""Computes the outputs of some ranks, one rank's after the other's."""

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather_base": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "barrier": "all_reduce",
}
"""Kind of each collective, for its duration."""

_ProcessGroup: Any = dist.ProcessGroup  # its stub has signatures that only callers in C++ use


class RankGroup(_ProcessGroup):  # type: ignore[misc]  # a class known as Any
    """A group of ranks: what torch asks of it, its HCCL communicator, and how its ranks meet in a collective.

    For device tensors it has an HCCL communicator, created at the first collective or by :meth:`get_hccl_comm_name`,
    whose buffers are taken at its first operation. For host tensors it stands in for gloo and takes nothing.

    A collective is complete when the call returns: in virtual time the current stream waits for it at once, also when
    ``async_op`` was asked for.

    Args:
        ranks: Lockstep of this process' ranks.
        name: torch's name of the group, the same on all its ranks.
        group_rank: This rank's number in the group.
        global_ranks: The group's ranks in the world.
        device_types: Whose tensors it takes: ``npu``, ``cpu`` or both.
        buffer_mb: HCCL buffer per direction in megabytes; None for the environment's.
        label: The group's name in reports.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        group_rank: int,
        global_ranks: Sequence[int],
        *,
        device_types: Sequence[str] = ("npu",),
        buffer_mb: int | None = None,
        label: str | None = None,
    ) -> None:
        super().__init__(group_rank, len(global_ranks))
        self._ranks = ranks
        self._name = name
        self._label = name if label is None else label
        self._group_rank = group_rank
        self._global_ranks = tuple(global_ranks)
        self._taken = tuple(device_types)
        self._buffer_mb = buffer_mb
        self._communicator: Communicator | None = None
        self._stream_id = 0
        self._num_collectives = 0
        self._description = ""

    # What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Torch's name of the backend."""
        return "hccl" if "npu" in self._taken else "gloo"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device_type) for device_type in self._taken]

    @property
    def pg_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_name(self) -> Any:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, as its creator says."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def _get_backend(self, device: torch.device) -> Any:
        self._check_device(torch.device(device).type)
        return self

    def shutdown(self) -> None:
        """Give the communicator's memory back."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None

    abort = shutdown

    # The communicator

    def get_hccl_comm_name(self, rank: int) -> str:
        """The communicator's name for operators that communicate themselves; creates it, without buffers."""
        del rank
        self.communicator()
        return self._name

    def communicator(self) -> Communicator:
        """The HCCL communicator on the calling rank's device; it has a stream of its own, as in torch_npu."""
        if self._communicator is None:
            active = platform()
            runtime = active.runtimes[active.current_device()]
            self._communicator = runtime.hccl.communicator(self._label, len(self._global_ranks), self._buffer_mb)
            self._stream_id = runtime.streams.take()
            runtime.communicators[self._name] = self._communicator
        return self._communicator

    # How ranks meet

    def _check_device(self, device_type: str) -> None:
        if device_type not in self._taken:
            raise RuntimeError(f"No backend type associated with device type {device_type}")

    def _check(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._check_device(tensor.device.type)
            if not tensor.is_contiguous():
                raise refusal("Tensors must be contiguous", INVALID_TYPE)

    def _arrive(self, runtime: DeviceRuntime, call: str) -> Arrival:
        """Be ready on the communicator's stream, behind what was queued on the current one."""
        try:
            self.communicator().operate()
        except OutOfHbmError as error:
            text = f"HCCL function error: {call}, error code is 3"
            raise refusal(text, "ERR02200 DIST call hccl api failed") from error
        streams, stream = runtime.card.streams, self._handle(runtime)
        streams.wait_event(stream, streams.record_event(runtime.current_stream()))
        runtime.capture_group(self)
        return Arrival(streams.ready_ns(stream) + runtime.card.take_collective_delay())

    def _operate(self, runtime: DeviceRuntime, call: str, num_bytes: int, arrival: Arrival) -> None:
        """Run on the communicator's stream from when all ranks are ready, before what the current one gets then."""
        card, stream = runtime.card, self._handle(runtime)
        streams = card.streams
        check_wait(runtime, arrival)
        duration_ns = card.costs.collective_ns(_COLLECTIVES[call], num_bytes, self.size())
        card.launch(f"hccl.{call}", stream, duration_ns, not_before_ns=arrival.time_ns, slowdown=1.0)
        streams.wait_event(runtime.current_stream(), streams.record_event(stream))

    def _handle(self, runtime: DeviceRuntime) -> int:
        return runtime.streams.handle_of(self._stream_id)

    def _collective(
        self,
        call: str,
        detail: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        combine: Combine,
        extra: Any = None,
        check: Callable[[Sequence[Any], Sequence[int]], None] | None = None,
        *,
        senders: Sequence[int] | None = None,
    ) -> None:
        """Meet the group's other ranks; the last one to come computes for all.

        Args:
            call: What is done; all ranks must do the same.
            detail: Root, sizes and types, in which they must agree, too.
            inputs: This rank's tensors to read.
            outputs: This rank's tensors to write.
            combine: Computes.
            extra: What ``check`` gets from each rank.
            check: Refuses what does not fit together.
            senders: Ranks whose inputs count. Default: all.
        """
        tensors = [*inputs, *outputs]
        self._check(tensors)
        on_device = any(tensor.device.type == "npu" for tensor in tensors)
        runtime = runtime_of(tensors[0].device) if on_device else None
        clock = platform().clock
        arrival = Arrival(clock.now_ns) if runtime is None else self._arrive(runtime, call)

        def finish(all_parts: list[Part], receivers: Sequence[int]) -> None:
            if check is not None:
                check([part.extra for part in all_parts], receivers)
            Arrival.join([part.arrival for part in all_parts])
            given = [part.inputs if senders is None or rank in senders else () for rank, part in enumerate(all_parts)]
            counts = [len(inputs) for inputs in given]
            targets = [target for rank in receivers for target in all_parts[rank].outputs]
            shapes = [tuple(target.shape) for target in targets]

            def compute(*hosts: Tensor) -> list[Tensor]:
                each = iter(hosts)
                parts = [[next(each) for _ in range(count)] for count in counts]
                results = combine(parts, receivers)
                return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]

            sources = [source for inputs in given for source in inputs]
            if not targets:
                return
            if on_device:
                update(targets, sources, compute)
            else:
                hosts = [source.clone() for source in sources if source is not None]
                for target, result in zip(targets, compute(*hosts), strict=True):
                    target.copy_(result)

        self._meet(f"{call} {detail}".rstrip(), Part(inputs, outputs, extra, arrival), finish)
        if runtime is None:
            clock.wait_until(arrival.time_ns + HOST_COLLECTIVE_NS)
        else:
            num_bytes = max(bytes_of(inputs), bytes_of(outputs))
            self._operate(runtime, call, num_bytes, arrival)

    def arrive(self, operation: str, arrival: Arrival) -> None:
        """Meet the group's other ranks where a captured graph with its collectives is replayed."""
        group = "replay", self._name, *self._global_ranks
        self._ranks.arrive(group, self._group_rank, self.size(), operation, arrival)

    def _meet(self, operation: Hashable, payload: Any, finish: Callable[[list[Any], Sequence[int]], None]) -> None:
        self._num_collectives += 1
        group = f"group {self._label!r} of ranks {list(self._global_ranks)}", self._num_collectives
        self._ranks.meet(group, self._group_rank, self.size(), operation, payload, finish)

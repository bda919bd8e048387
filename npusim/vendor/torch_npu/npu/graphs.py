"""The double of ``torch_npu.npu.graphs``: capture with a private memory pool; replay is modelled for shapes only."""

from __future__ import annotations

import gc
from types import TracebackType

from torch_npu._C import _NPUTaskGroupHandle
from torch_npu.npu.devices import runtime_of, synchronize
from torch_npu.npu.memory import empty_cache
from torch_npu.npu.streams import Stream, StreamContext

from npusim.device.cost import GRAPH_TASK_NS
from npusim.device.ledger import Owner
from npusim.device.streams import StreamEvent
from npusim.errors import UnmodelledCallError
from npusim.hccl.ranks import Arrival
from npusim.memory.pools import PoolId
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import RankGroup
from npusim.torch_backend.task_groups import CapturedTask
from npusim.torch_backend.values import RealValues


def graph_pool_handle() -> PoolId:
    """An id for a memory pool that several graphs share."""
    pool_id: PoolId = runtime_of(None).new_pool_id(user=True)
    return pool_id


def is_current_stream_capturing() -> bool:
    """Whether operators on the current stream are captured."""
    is_capturing: bool = runtime_of(None).is_current_stream_capturing()
    return is_capturing


class ExternalEvent:
    """An event that a captured graph waits for and work outside of it records; unlike others, in that order.

    In a replay, whatever a graph waits for is taken to be recorded in time; the waiting itself has its cost.
    """

    def __init__(self) -> None:
        self._recorded: StreamEvent | None = None

    def record(self, stream: Stream) -> None:
        """Record behind everything queued on a stream."""
        self._recorded = runtime_of(stream.device_index).card.streams.record_event(stream.npu_stream)

    def wait(self, stream: Stream) -> None:
        """Let later work of a stream wait for it; on a captured stream this becomes part of the graph."""
        runtime = runtime_of(stream.device_index)
        if runtime.is_capturing(stream.npu_stream):
            runtime.card.streams.enqueue(stream.npu_stream, GRAPH_TASK_NS)
            return
        if self._recorded is None:
            raise UnmodelledCallError("ExternalEvent.wait before record outside of a capture would block for ever")
        runtime.card.streams.wait_event(stream.npu_stream, self._recorded)

    def reset(self, stream: Stream) -> None:
        """Make it usable again, in the stream's order; on a captured stream this becomes part of the graph."""
        if not runtime_of(stream.device_index).is_capturing(stream.npu_stream):
            self._recorded = None


def graph_task_group_begin(stream: Stream) -> None:
    """From now on a captured stream's operators form a group, whose arguments can be changed after the capture.

    Raises:
        RuntimeError: The stream is not captured, or a group is open. Grade of the texts: assumed.
    """
    runtime = runtime_of(stream.device_index)
    if not runtime.is_capturing(stream.npu_stream):
        raise RuntimeError("graph_task_group_begin() called on a stream that is not being captured.")
    runtime.task_groups.begin(stream.npu_stream, "group", runtime.card.streams.ready_ns(stream.npu_stream))


def graph_task_group_end(stream: Stream) -> _NPUTaskGroupHandle:
    """Close the group and name it.

    Raises:
        RuntimeError: No group is open on the stream. Grade of the text: assumed.
    """
    runtime = runtime_of(stream.device_index)
    begin_ns = runtime.task_groups.end(stream.npu_stream, "group")
    task = CapturedTask(runtime.card.streams.ready_ns(stream.npu_stream) - begin_ns)
    runtime.task_groups.captured.append(task)
    handle = _NPUTaskGroupHandle()
    handle.task = task
    return handle


def graph_task_update_begin(stream: Stream, handle: _NPUTaskGroupHandle) -> None:
    """Until :func:`graph_task_update_end`, operators on the stream replace the arguments of those in a group.

    They are the same operators with the same outputs. They take the host's time to launch them; how long they run
    becomes part of the graph, of a replay that goes on, too.

    Raises:
        TypeError: It is no group's handle.
        RuntimeError: An update is open on the stream. Grade of the text: assumed.
    """
    if not isinstance(handle, _NPUTaskGroupHandle):
        raise TypeError(f"graph_task_update_begin(): incompatible function arguments: {handle!r}")
    runtime = runtime_of(stream.device_index)
    runtime.task_groups.begin(stream.npu_stream, "update", handle.task)
    runtime.card.streams.begin_capture(stream.npu_stream)


def graph_task_update_end(stream: Stream) -> None:
    """End the update.

    Raises:
        RuntimeError: No update is open on the stream. Grade of the text: assumed.
    """
    runtime = runtime_of(stream.device_index)
    task = runtime.task_groups.end(stream.npu_stream, "update")
    duration_ns = runtime.card.streams.end_capture()
    if duration_ns and task.replayed_on is not None:
        runtime.card.streams.correct(task.replayed_on, duration_ns - task.duration_ns)
    task.duration_ns = duration_ns or task.duration_ns


class NPUGraph:
    """One captured graph; what was allocated during capture stays in its pool until it is :meth:`reset` or dies."""

    def __init__(self) -> None:
        self._runtime = runtime_of(None)
        self._pool: PoolId | None = None
        self._capture_stream: int | None = None
        self._holding: int | None = None
        self._duration_ns = 0
        self._tasks: list[CapturedTask] = []
        self._groups: list[RankGroup] = []

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Capture the current stream from now on.

        Raises:
            RuntimeError: On the default stream, with ``TASK_QUEUE_ENABLE=2``, during another capture, or if this graph
                was captured before.
        """
        del capture_error_mode
        runtime = self._runtime
        if runtime.task_queue_level >= 2:
            raise RuntimeError(
                "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export TASK_QUEUE_ENABLE=1/0."
            )
        if self._pool is not None:
            raise RuntimeError(
                "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        stream = runtime.current_stream()
        if stream == runtime.card.default_stream:
            raise RuntimeError(
                "NPU graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        runtime.begin_capture(stream)
        self._pool = runtime.new_pool_id(user=False) if pool is None else pool
        self._capture_stream = stream
        runtime.allocator.begin_allocate_to_pool(self._pool, lambda other: other == stream)

    def capture_end(self) -> None:
        """End the capture; the graph itself takes device memory.

        Raises:
            RuntimeError: No capture of this graph is going on, or it is another stream that is captured.
        """
        if self._pool is None or self._capture_stream is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        if self._runtime.current_stream() != self._capture_stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._capture_stream = None
        self._groups = list(self._runtime.captured_groups)
        self._tasks = self._runtime.task_groups.take_captured()
        self._duration_ns = self._runtime.end_capture() - sum(task.duration_ns for task in self._tasks)
        self._runtime.allocator.end_allocate_to_pool(self._pool)
        self._holding = self._runtime.card.charge(
            Owner.ACL_GRAPH, "captured graph", self._runtime.card.profile.acl_graph_bytes
        )

    def replay(self) -> None:
        """Run the captured operators again; takes no memory, and the time of the operators without their launches.

        Ranks whose collectives were captured start together, and at the pace of the slowest.

        Raises:
            RuntimeError: Nothing was captured.
            UnmodelledCallError: In a world of real values, which would have to be computed again.
        """
        if self._holding is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        if isinstance(platform().values, RealValues):
            raise UnmodelledCallError("NPUGraph.replay computes no values; run the world in shape mode")
        runtime = self._runtime
        stream = runtime.current_stream()
        arrival = Arrival(runtime.card.streams.ready_ns(stream), runtime.card.slowdown)
        for group in self._groups:
            group.arrive("replay of a graph", arrival)
        duration_ns = self._duration_ns
        for task in self._tasks:
            duration_ns += task.duration_ns
            task.replayed_on = stream
        runtime.card.launch("graph", stream, duration_ns, not_before_ns=arrival.time_ns, slowdown=arrival.slowdown)

    def reset(self) -> None:
        """Forget the graph and let go of its pool; nothing happens without a captured graph."""
        if self._holding is not None and self._pool is not None:
            self._runtime.card.ledger.release(self._holding)
            self._runtime.allocator.release_pool(self._pool)
            self._holding = self._pool = None

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> PoolId:
        """The id of this graph's pool, for others to share."""
        if self._holding is None or self._pool is None:
            raise RuntimeError("Called NPUGraph::pool() without a preceding successful capture.")
        return self._pool


class graph:  # noqa: N801 - torch_npu's name
    """Captures what runs inside a ``with`` block.

    Args:
        npu_graph: Becomes the captured graph.
        pool: Memory pool to share with other graphs. Default: one of its own.
        stream: The stream to capture. Default: one that all captures use.
        auto_dispatch_capture: Whether arguments of captured operators can be updated; not modelled.
        capture_error_mode: Accepted as by torch_npu.
    """

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: PoolId | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        del auto_dispatch_capture
        runtime = runtime_of(None)
        if stream is None:
            stream = Stream(stream_id=runtime.capture_stream_id, device_index=runtime.card.index)
        self._stream = StreamContext(stream)
        self._graph = npu_graph
        self._pool = pool
        self._mode = capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        if platform().environment.get("TORCH_NPUGRAPH_GC") == "1":
            gc.collect()
        empty_cache()
        self._stream.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException:
            self._stream.__exit__()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._stream.__exit__()


__all__ = [
    "ExternalEvent",
    "NPUGraph",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "is_current_stream_capturing",
]

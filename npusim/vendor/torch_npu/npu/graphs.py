"""The double of ``torch_npu.npu.graphs``: capture with a private memory pool; replay is modelled for shapes only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from npusim.device.ledger import Owner
from npusim.errors import UnmodelledCallError
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.values import RealValues
from torch_npu.npu.memory import empty_cache
from torch_npu.npu.streams import Stream
from torch_npu.npu.streams import stream as on_stream

PoolId = tuple[int, int]


def _runtime() -> DeviceRuntime:
    active = platform()
    return active.runtimes[active.current_device()]


def graph_pool_handle() -> PoolId:
    """An id for a memory pool that several graphs share."""
    return _runtime().new_pool_id(user=True)


def is_current_stream_capturing() -> bool:
    """Whether operators on the current stream are captured."""
    return _runtime().is_current_stream_capturing()


class NPUGraph:
    """One captured graph; what was allocated during capture stays in its pool until :meth:`reset`."""

    def __init__(self) -> None:
        self._runtime = _runtime()
        self._pool: PoolId | None = None
        self._is_capturing = False
        self._holding: int | None = None

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Capture the current stream from now on.

        Raises:
            RuntimeError: On the default stream, with ``TASK_QUEUE_ENABLE=2``, or if this graph was captured before.
        """
        del capture_error_mode
        runtime = self._runtime
        if runtime.task_queue_level >= 2:
            raise RuntimeError(
                "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export TASK_QUEUE_ENABLE=1/0."
            )
        if self._pool is not None:
            raise RuntimeError("This NPUGraph instance already owns a captured graph.")
        stream = runtime.current_stream()
        if stream == runtime.card.default_stream:
            raise RuntimeError(
                "NPU graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        self._pool = runtime.new_pool_id(user=False) if pool is None else pool
        runtime.allocator.begin_allocate_to_pool(self._pool, lambda other: other == stream)
        runtime.begin_capture(stream)
        self._is_capturing = True

    def capture_end(self) -> None:
        """End the capture; the graph itself takes device memory.

        Raises:
            RuntimeError: No capture is going on.
        """
        if not self._is_capturing or self._pool is None:
            raise RuntimeError("capture_end was called without a capture")
        self._is_capturing = False
        self._runtime.end_capture()
        self._runtime.allocator.end_allocate_to_pool(self._pool)
        self._holding = self._runtime.card.charge(
            Owner.ACL_GRAPH, "captured graph", self._runtime.card.profile.acl_graph_bytes
        )

    def replay(self) -> None:
        """Run the captured operators again; takes no memory.

        Raises:
            RuntimeError: Nothing was captured.
            UnmodelledCallError: In a world of real values, which would have to be computed again.
        """
        if self._holding is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        if isinstance(platform().values, RealValues):
            raise UnmodelledCallError("NPUGraph.replay computes no values; run the world in shape mode")
        self._runtime.card.launch("graph", self._runtime.current_stream())

    def reset(self) -> None:
        """Forget the graph and let go of its pool."""
        if self._holding is not None and self._pool is not None:
            self._runtime.card.ledger.release(self._holding)
            self._runtime.allocator.release_pool(self._pool)
        self._holding = self._pool = None

    def pool(self) -> PoolId:
        """The id of this graph's pool, for others to share."""
        if self._pool is None:
            raise RuntimeError("Called NPUGraph::pool() without a preceding successful capture.")
        return self._pool


@contextmanager
def graph(
    npu_graph: NPUGraph,
    pool: PoolId | None = None,
    stream: Stream | None = None,
    auto_dispatch_capture: bool = False,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Capture what runs inside into ``npu_graph``, on a stream of its own unless one is given."""
    del auto_dispatch_capture
    _runtime().synchronize_device()
    gc.collect()
    empty_cache()
    with on_stream(Stream(handle=_runtime().capture_stream()) if stream is None else stream):
        npu_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            npu_graph.capture_end()


__all__ = ["NPUGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"]

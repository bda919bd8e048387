"""The streams of one device as torch_npu hands them out: a default one, and a pool for each priority."""

from __future__ import annotations

from typing import Final

from npusim.device.streams import Streams

STREAMS_PER_POOL: Final = 32
DEFAULT_STREAM_ID: Final = 0
_FIRST_IDS: Final = {0: 96, -1: 128}
"""Ids of the first stream of normal and of high priority. Exact: ``stream_id`` of torch_npu 2.13.0."""


class StreamPool:
    """Streams by torch's id, which stands for a stream of the device, made when it is first needed.

    A pool's streams are handed out in turn, so the 33rd new stream is the first one again (exact: torch_npu 2.13.0).

    Args:
        streams: The device's streams.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._handles = {DEFAULT_STREAM_ID: streams.default_stream}
        self._ids = {streams.default_stream: DEFAULT_STREAM_ID}
        self._num_taken = dict.fromkeys(_FIRST_IDS, 0)

    def take(self, priority: int = 0) -> int:
        """The id of the next stream.

        Args:
            priority: Below 0 is high; anything else is normal.
        """
        priority = max(-1, min(0, priority))
        number = self._num_taken[priority] % STREAMS_PER_POOL
        self._num_taken[priority] += 1
        return _FIRST_IDS[priority] + number

    def handle_of(self, stream_id: int) -> int:
        """The device's handle of a stream."""
        handle = self._handles.get(stream_id)
        if handle is None:
            handle = self._handles[stream_id] = self._streams.create()
            self._ids[handle] = stream_id
        return handle

    def id_of(self, handle: int) -> int:
        """The id of a stream of this pool."""
        return self._ids[handle]

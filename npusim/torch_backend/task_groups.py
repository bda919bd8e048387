"""Spans of operators on a stream, opened and closed by vendor code: groups of a captured graph, updates of a group."""

from __future__ import annotations


class TaskGroups:
    """The open spans of one device, at most one of each kind on a stream."""

    def __init__(self) -> None:
        self._open: set[tuple[int, str]] = set()

    def begin(self, stream: int, kind: str) -> None:
        """Open a span.

        Raises:
            RuntimeError: One of this kind is open on the stream. Grade of the text: assumed.
        """
        if (stream, kind) in self._open:
            raise RuntimeError(f"graph_task_{kind}_begin() called twice without graph_task_{kind}_end().")
        self._open.add((stream, kind))

    def end(self, stream: int, kind: str) -> None:
        """Close a span.

        Raises:
            RuntimeError: None of this kind is open on the stream. Grade of the text: assumed.
        """
        if (stream, kind) not in self._open:
            raise RuntimeError(f"graph_task_{kind}_end() called before graph_task_{kind}_begin().")
        self._open.remove((stream, kind))

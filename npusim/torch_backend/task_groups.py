"""Spans of operators on a stream, opened and closed by vendor code: groups of a captured graph, updates of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class CapturedTask:
    """A group of captured operators whose arguments can be changed.

    Attributes:
        duration_ns: How long they take with their arguments of now.
        replayed_on: Stream of the last replay, whose end moves if they take longer.
    """

    duration_ns: int
    replayed_on: int | None = None


class TaskGroups:
    """The open spans of one device, at most one of each kind on a stream.

    Attributes:
        captured: Groups of the capture that is going on.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], Any] = {}
        self.captured: list[CapturedTask] = []

    def take_captured(self) -> list[CapturedTask]:
        """The groups of the capture that ends."""
        captured, self.captured = self.captured, []
        return captured

    def begin(self, stream: int, kind: str, note: Any) -> None:
        """Open a span; :meth:`end` returns the note.

        Raises:
            RuntimeError: One of this kind is open on the stream. Grade of the text: assumed.
        """
        if (stream, kind) in self._open:
            raise RuntimeError(f"graph_task_{kind}_begin() called twice without graph_task_{kind}_end().")
        self._open[stream, kind] = note

    def end(self, stream: int, kind: str) -> Any:
        """Close a span and return what was noted at its beginning.

        Raises:
            RuntimeError: None of this kind is open on the stream. Grade of the text: assumed.
        """
        if (stream, kind) not in self._open:
            raise RuntimeError(f"graph_task_{kind}_end() called before graph_task_{kind}_begin().")
        return self._open.pop((stream, kind))

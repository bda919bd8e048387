"""The ordered record of everything a world did, and its hash."""

from __future__ import annotations

import hashlib


class EventLog:
    """Hashes each event as it happens; two runs that did the same have the same :attr:`digest`.

    Fields are written as text, so only values whose ``str`` is the same on every machine belong here (integers, names).

    Args:
        keep: Keep the events as tuples in :attr:`events` too; off by default since a start-up makes about 10^5 of them.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._hash = hashlib.sha256()
        self.num_events = 0
        self.events: list[tuple[object, ...]] | None = [] if keep else None

    def record(self, *fields: object) -> None:
        """Append one event: first what happened, then its numbers."""
        self._hash.update("\x1f".join(map(str, fields)).encode() + b"\n")
        self.num_events += 1
        if self.events is not None:
            self.events.append(fields)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over all events so far."""
        return self._hash.hexdigest()

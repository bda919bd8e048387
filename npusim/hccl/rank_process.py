"""A rank in a process of its own, which meets its peers, processes too, through a key-value store that they share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from npusim.device.clock import Clock
from npusim.errors import CollectiveMismatchError, RankMissingError, UnmodelledCallError
from npusim.hccl.ranks import LoneRank, Portable, group_text

P = TypeVar("P")


class Store(Protocol):
    """What is needed of ``torch.distributed``'s stores (``FileStore``, ``TCPStore``)."""

    def set(self, key: str, value: bytes) -> None:
        """Let all processes know a value."""

    def get(self, key: str) -> bytes:
        """A value; waits until some process has set it, up to the store's time limit."""

    def delete_key(self, key: str) -> bool:
        """Forget a value."""


class RankProcess(LoneRank):
    """One rank of several, each in its own process with its own world; what they exchange are values.

    Args:
        rank: The rank of this process.
        store: Shared by all of them.
        clock: Virtual time of this process; in a collective all wait for the latest. Default: one of its own.
    """

    def __init__(self, rank: int, store: Store, clock: Clock | None = None) -> None:
        super().__init__(rank, clock)
        self._store = store
        self._last_keys: dict[Hashable, str] = {}

    @property
    def is_lone(self) -> bool:
        """Whether its peers are not there: they are."""
        return False

    def meet(
        self,
        group: Hashable,
        group_rank: int,
        num_ranks: int,
        operation: Hashable,
        payload: P,
        finish: Callable[[list[P], Sequence[int]], None],
    ) -> None:
        """See :class:`Ranks`; every process calls ``finish``, for its own rank's results.

        Raises:
            CollectiveMismatchError: The ranks do different things.
            RankMissingError: One did not come within the store's time limit.
            UnmodelledCallError: The payload cannot leave this process.
        """
        if not isinstance(payload, Portable):
            raise UnmodelledCallError(f"{operation} between ranks in several processes is not modelled")
        key = f"npusim/{group}/"
        self._store.set(f"{key}{group_rank}", pickle.dumps((operation, payload)))
        payloads: list[P] = []
        for rank in range(num_ranks):
            if rank == group_rank:
                payloads.append(payload)
                continue
            theirs, part = self._answer(f"{key}{rank}", f"{operation} on {group_text(group)} for group rank {rank}")
            if theirs != operation:
                raise CollectiveMismatchError(
                    f"rank {self.current} calls {operation} on {group_text(group)} where group rank {rank} calls "
                    f"{theirs}"
                )
            payloads.append(part)
        self._forget_last(group, f"{key}{group_rank}")
        finish(payloads, [group_rank])

    def _answer(self, key: str, meeting: str) -> tuple[Hashable, Any]:
        try:
            answer = self._store.get(key)
        except Exception as error:  # torch's, whose class and text depend on the store
            text = f"rank {self.current} waits in {meeting}, which does not arrive within the store's time limit"
            raise RankMissingError(text) from error
        operation, part = pickle.loads(answer)
        return operation, part

    def _forget_last(self, group: Hashable, key: str) -> None:
        """Whoever has answered this collective has read all of the one before."""
        name = group[:-1] if isinstance(group, tuple) else group  # without the collective's number
        last = self._last_keys.get(name)
        if last is not None:
            self._store.delete_key(last)
        self._last_keys[name] = key

"""Several ranks in one process: one thread each, of which exactly one runs, in an order that never changes.

Or one rank alone, whose peers are taken to do as it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from npusim.device.clock import Clock
from npusim.device.moments import latest
from npusim.errors import CollectiveMismatchError, RankMissingError, WorldError

T = TypeVar("T")
P = TypeVar("P")


def group_text(group: Hashable) -> str:
    """A group and the number of its collective, for a message."""
    return ", collective ".join(map(str, group)) if isinstance(group, tuple) else str(group)


class Portable:
    """A payload that ranks in other processes may get: pickled, without what belongs to this process."""

    __slots__ = ()


@dataclass(slots=True)
class Arrival(Portable):
    """When a rank is ready for a collective, and then, for all its ranks, when the last one was.

    Attributes:
        time_ns: The time, in nanoseconds.
        slowdown: How many times as long as others its kernels take; then that of the slowest.
        spread_ns: How long the first one waits for the last one.
    """

    time_ns: int
    slowdown: float = 1.0
    spread_ns: int = 0

    @staticmethod
    def join(arrivals: Sequence[Arrival]) -> None:
        """All have arrived."""
        times = [arrival.time_ns for arrival in arrivals]
        last = reduce(latest, times)
        slowdown = max(arrival.slowdown for arrival in arrivals)
        for arrival in arrivals:
            arrival.time_ns, arrival.slowdown, arrival.spread_ns = last, slowdown, last - min(times)


class _Meeting(Generic[P]):
    """Ranks of a group that have arrived at one collective."""

    def __init__(self, operation: Hashable, num_ranks: int) -> None:
        self.operation = operation
        self.num_ranks = num_ranks
        self.payloads: dict[int, P] = {}
        self.is_over = False


class _Rank:
    """One rank's thread: what it returned, and what it waits for."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.waits_for: _Meeting[Any] | None = None
        self.is_done = False
        self.result: Any = None


class Ranks:
    """Runs ranks in lockstep: a rank runs until it must wait for others in a collective, then the next one does.

    Args:
        clock: Virtual time, in which each rank is a process. Default: one of its own.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = Clock() if clock is None else clock
        self._ranks: list[_Rank] = []
        self._meetings: dict[Hashable, _Meeting[Any]] = {}
        self._failures: list[tuple[int, BaseException]] = []
        self.attached: dict[Hashable, Any] = {}
        """What others keep per rank of this world; it goes with the world."""

    @property
    def current(self) -> int:
        """The rank that runs; 0 outside :meth:`run`."""
        return self._clock.process

    @property
    def are_several(self) -> bool:
        """Whether other ranks run, too, so that the calling one stands for a process of its own."""
        return len(self._ranks) > 1

    @property
    def is_lone(self) -> bool:
        """Whether the calling rank's peers are not there, so that what differs from rank to rank cannot be checked."""
        return False

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run ``functions[rank]`` for all ranks and return what each returned.

        Raises:
            CollectiveMismatchError: Ranks that wait for each other, or for one that has ended, in a collective.
            BaseException: The first error that a rank raised, with a note that names the rank. That others then wait in
                vain does not count.
            WorldError: Ranks are running already, or there are none to run.
        """
        if self._ranks:
            raise WorldError("ranks are running already; a rank cannot start others")
        if not functions:
            raise WorldError("there are no ranks to run")
        self._ranks = [_Rank() for _ in functions]
        threads = [
            threading.Thread(target=self._main, args=(index, function), name=f"rank{index}", daemon=True)
            for index, function in enumerate(functions)
        ]
        try:
            for thread in threads:
                thread.start()
            self._ranks[0].turn.release()
            for thread in threads:
                thread.join()
            self._raise_first_error()
            return [rank.result for rank in self._ranks]
        finally:
            self._ranks = []
            self._clock.process = 0
            self._meetings.clear()
            self._failures.clear()

    def meet(
        self,
        group: Hashable,
        group_rank: int,
        num_ranks: int,
        operation: Hashable,
        payload: P,
        finish: Callable[[list[P], Sequence[int]], None],
    ) -> None:
        """Wait until all ranks of a group are here; the last one calls ``finish``.

        It gets all payloads, by group rank, and the group ranks that are to have their results.

        Args:
            group: Identifies the group and how many collectives it has run.
            group_rank: The caller's rank in it.
            num_ranks: Ranks in it.
            operation: What the caller does; all must do the same.
            payload: The caller's part.
            finish: Does the collective.

        Raises:
            CollectiveMismatchError: The ranks do different things.
            RankMissingError: One will never come.
        """
        if num_ranks == 1:
            finish([payload], [group_rank])
            return
        if not self._ranks:
            raise RankMissingError(
                f"{operation} of {num_ranks} ranks was called outside of SimWorld.run_ranks, where none can arrive"
            )
        meeting = self._meetings.setdefault(group, _Meeting(operation, num_ranks))
        if meeting.operation != operation:
            raise CollectiveMismatchError(
                f"rank {self.current} calls {operation} on {group_text(group)} where group rank "
                f"{min(meeting.payloads)} calls {meeting.operation}"
            )
        meeting.payloads[group_rank] = payload
        if len(meeting.payloads) == num_ranks:
            del self._meetings[group]
            meeting.is_over = True
            payloads = [meeting.payloads[index] for index in range(num_ranks)]
            meeting.payloads.clear()  # ranks that still wait hold the meeting, and must not hold others' tensors
            finish(payloads, range(num_ranks))
            return
        me = self._ranks[self.current]
        me.waits_for = meeting
        rank = self.current
        self._pass_turn()
        me.turn.acquire()
        self._clock.process = rank
        me.waits_for = None
        if not meeting.is_over:
            missing = [rank for rank in range(num_ranks) if rank not in meeting.payloads]
            raise RankMissingError(
                f"rank {self.current} waits in {operation} on {group_text(group)} for ranks of the group that never "
                f"arrive: {', '.join(map(str, missing))}"
            )

    def arrive(self, group: Hashable, group_rank: int, num_ranks: int, operation: Hashable, arrival: Arrival) -> None:
        """Wait until all ranks of a group are here, and find out when the last one is.

        Args:
            group: Identifies the group.
            group_rank: The caller's rank in it.
            num_ranks: Ranks in it.
            operation: What the caller does; all must do the same.
            arrival: The caller's, and afterwards that of all.

        Raises:
            CollectiveMismatchError: The ranks do different things.
            RankMissingError: One will never come.
        """
        slot = "arrivals", self.current, group
        number = self.attached[slot] = self.attached.get(slot, 0) + 1
        self.meet((group, number), group_rank, num_ranks, operation, arrival, lambda all_, _: Arrival.join(all_))

    def _main(self, index: int, function: Callable[[], Any]) -> None:
        me = self._ranks[index]
        me.turn.acquire()
        self._clock.process = index
        try:
            me.result = function()
        except BaseException as error:  # noqa: BLE001 - handed to run(), which raises it
            self._failures.append((index, error))
        me.is_done = True
        self._pass_turn()

    def _pass_turn(self) -> None:
        """Let the next rank run: one whose collective is over, else, if nobody can go on, one that then gives up."""
        start = self.current + 1
        order = [self._ranks[(start + i) % len(self._ranks)] for i in range(len(self._ranks))]
        waiting = [rank for rank in order if not rank.is_done]
        ready = [rank for rank in waiting if rank.waits_for is None or rank.waits_for.is_over]
        if waiting:
            (ready or waiting)[0].turn.release()

    def _raise_first_error(self) -> None:
        causes = [failure for failure in self._failures if not isinstance(failure[1], RankMissingError)]
        for index, error in causes or self._failures:
            error.add_note(f"raised on rank {index} of {len(self._ranks)}")
            raise error


class LoneRank(Ranks):
    """One rank of several: what it does in a collective, its peers are taken to do as well, with the same tensors.

    That is what tensor-parallel ranks with equal seeds and equal inputs do, as far as sizes and integer data go.

    Args:
        rank: The rank that runs.
        clock: Virtual time. Default: one of its own.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._clock.process = rank

    @property
    def are_several(self) -> bool:
        """Whether the rank stands for one of several processes: always."""
        return True

    @property
    def is_lone(self) -> bool:
        """Whether its peers are not there: always."""
        return True

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """There are no other ranks to run.

        Raises:
            WorldError: More than one function is given.
        """
        if len(functions) != 1:
            raise WorldError(f"this world has only rank {self.current}, got {len(functions)} functions to run as ranks")
        return [functions[0]()]

    def meet(
        self,
        group: Hashable,  # noqa: ARG002
        group_rank: int,
        num_ranks: int,
        operation: Hashable,  # noqa: ARG002
        payload: P,
        finish: Callable[[list[P], Sequence[int]], None],
    ) -> None:
        """Finish at once, with the caller's payload in every rank's place."""
        finish([payload] * num_ranks, [group_rank])

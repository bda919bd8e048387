"""Records what a step does to a world, and does it again without executing the step's operators.

A step that leaves memory exactly as it found it can be repeated: its operators would be given the same addresses, reach
the same peaks, and take the same time, but for what depends on the lengths of sequences. So a repetition moves the
clocks, with durations from the same cost functions, the allocator's statistics, and the generators of random numbers,
which would have been drawn from as often; nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from npusim.device.moments import Line, Moment, OpenDuration, Origin, line_of
from npusim.memory.statistics import Effect
from npusim.world import SimWorld

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepEffect:
    """What a step did.

    Attributes:
        state: Of the memory that it began in and left.
        hosts: When each process was done with it.
        streams: When each stream that it used was, by device and handle.
        orders: What must be earlier than what, for memory to be used as it was.
        durations: Of each rank's pass; what they say of other lengths must agree.
        statistics: Of each device's allocator.
        num_draws: From each device's random numbers.
    """

    state: str
    hosts: tuple[Line, ...]
    streams: tuple[tuple[int, int, Line], ...]
    orders: tuple[tuple[Line, Line, bool], ...]
    durations: tuple[OpenDuration, ...]
    statistics: tuple[Effect, ...]
    num_draws: tuple[int, ...]

    def duration_ns(self, lens: Sequence[int], cached_lens: Sequence[int]) -> int | None:
        """The open duration for these lengths; None if the ranks disagree, or memory would be used otherwise."""
        durations = {duration.again(lens, cached_lens) for duration in self.durations}
        if len(durations) != 1:
            return None
        (duration_ns,) = durations
        agree = all((first.at(duration_ns) <= second.at(duration_ns)) is order for first, second, order in self.orders)
        return duration_ns if agree else None


class StepRecorder:
    """Records and repeats steps of all ranks of a world.

    Args:
        world: Whose ranks execute the steps; process 0 tells them to.
        num_ranks: How many they are.
    """

    def __init__(self, world: SimWorld, num_ranks: int) -> None:
        self._world = world
        self._num_ranks = num_ranks
        self._marks: Hashable = None
        self._state = ""

    def state(self) -> str:
        """Identifies the memory of all devices: who holds what, and every block of the caching allocators."""
        marks = self._current_marks()
        if marks != self._marks:
            self._marks = marks
            self._state = self._fingerprint()
        return self._state

    def record(self, run: Callable[[], T]) -> tuple[T, StepEffect | None]:
        """Execute a step; its effect is None if it cannot be repeated."""
        world = self._world
        if not self._is_idle():
            return run(), None
        before, num_events = self.state(), world.event_log.num_events
        seeds, draws_before = self._random_positions()
        recordings = [runtime.allocator.statistics.record() for runtime in world.runtimes]
        origin = Origin(world.clock.now_ns)
        self._begin(origin)
        try:
            result = run()
        finally:
            hosts, streams = self._end(origin)
            effects = [recording.effect() for recording in recordings]
        seeds_after, draws_after = self._random_positions()
        statistics = tuple(effect for effect in effects if effect is not None)
        repeatable = (
            origin.is_linear
            and len(set(map(int, origin.durations))) == 1
            and len(statistics) == len(effects)
            and world.event_log.num_events == num_events
            and seeds_after == seeds
            and self.state() == before
            and self._is_idle()
        )
        if not repeatable:
            return result, None
        num_draws = tuple(after - before for before, after in zip(draws_before, draws_after, strict=True))
        orders, durations = tuple(origin.orders), tuple(origin.durations)
        return result, StepEffect(before, hosts, streams, orders, durations, statistics, num_draws)

    def repeat(self, effect: StepEffect, lens: Sequence[int], cached_lens: Sequence[int]) -> bool:
        """Do what a recorded step did, with other lengths of sequences.

        Args:
            effect: Recorded in the memory's state of now.
            lens: New tokens of each request.
            cached_lens: Tokens of each that are in the cache.

        Returns:
            Whether it was done. If not, nothing was: the step must be executed, since something that is planned for a
            device would happen meanwhile, or streams would meet in another order.
        """
        world = self._world
        if not self._is_idle():
            return False
        duration_ns = effect.duration_ns(lens, cached_lens)
        if duration_ns is None:
            return False
        start_ns = world.clock.now_ns
        ends_ns = [start_ns + line.at(duration_ns) for line in effect.hosts]
        if any(card.agenda.next_ns <= max(ends_ns) for card in world.cards):
            return False
        for process, end_ns in enumerate(ends_ns):
            world.clock.of(process).wait_until(end_ns)
        for device, stream, line in effect.streams:
            world.cards[device].streams.occupy_until(stream, start_ns + line.at(duration_ns))
        world.clock.end_together(self._num_ranks)
        for runtime, statistics, num_draws in zip(world.runtimes, effect.statistics, effect.num_draws, strict=True):
            runtime.allocator.statistics.repeat(statistics)
            runtime.random.skip(num_draws)
        self._marks = self._current_marks()
        return True

    def _is_idle(self) -> bool:
        now_ns = self._world.clock.now_ns
        return all(card.streams.idle_from_ns <= now_ns for card in self._world.cards)

    def _begin(self, origin: Origin) -> None:
        clock = self._world.clock
        clock.start_together(self._num_ranks)
        clock.replace({process: Moment.start(origin) for process in range(self._num_ranks)})

    def _end(self, origin: Origin) -> tuple[tuple[Line, ...], tuple[tuple[int, int, Line], ...]]:
        clock = self._world.clock
        times_ns = [clock.of(process).now_ns for process in range(self._num_ranks)]
        streams = []
        for card in self._world.cards:
            for stream, moment in card.streams.take_moments():
                streams.append((card.index, stream, moment.line))
        clock.replace({process: int(time_ns) for process, time_ns in enumerate(times_ns)})
        return tuple(line_of(time_ns, origin) for time_ns in times_ns), tuple(streams)

    def _random_positions(self) -> tuple[list[int], list[int]]:
        generators = [runtime.random for runtime in self._world.runtimes]
        return [generator.seed for generator in generators], [generator.offset for generator in generators]

    def _current_marks(self) -> Hashable:
        """Changes whenever memory is taken or given back."""
        marks = []
        for runtime in self._world.runtimes:
            card, statistics = runtime.card, runtime.allocator.statistics
            counts = [(c.allocations, c.allocations_rises, c.pending) for c in (statistics.small, statistics.large)]
            disturbances = (card.slowdown, card.collective_delay_ns)
            marks.append((card.ledger.num_changes, card.faults.num_allocations, disturbances, *counts))
        return tuple(marks)

    def _fingerprint(self) -> str:
        text = sha256()
        for runtime in self._world.runtimes:
            card = runtime.card
            disturbances = (card.slowdown, card.collective_delay_ns)
            text.update(repr((disturbances, card.ledger.bytes_by_owner())).encode())
            text.update(runtime.allocator.layout().tobytes())
        return text.hexdigest()

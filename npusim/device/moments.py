"""Points in time that remember how they came about, so that a step can be repeated with another duration in it.

Times in a world are whole nanoseconds that come about by adding durations, and by waiting for the later of two times
(:func:`latest`). If one duration ``d`` of a step is left open, every time after it is therefore
``max(fixed, after + d)``: two numbers say what it is for any ``d``. A :class:`Moment` is such a time. It carries them
along, and is for everybody else the whole number that it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

NEVER = -(1 << 62)
"""Earlier than everything; in place of a number that does not exist."""


class OpenDuration(int):
    """How long something takes this time; in a repetition it takes as long as :attr:`again` says.

    Args:
        duration_ns: This time.
        again: The duration for other numbers of new tokens and of cached tokens, by request.
    """

    again: Callable[[Sequence[int], Sequence[int]], int]

    def __new__(cls, duration_ns: int, again: Callable[[Sequence[int], Sequence[int]], int]) -> Self:  # noqa: D102
        duration = super().__new__(cls, duration_ns)
        duration.again = again
        return duration


@dataclass(slots=True)
class Origin:
    """What the moments of one recorded step have in common.

    Attributes:
        start_ns: When it began.
        durations: The open ones that were met.
        orders: Pairs of moments that were compared, and whether the first was not later than the second.
        is_linear: Whether ``max(fixed, after + d)`` holds: an open duration did not follow another one.
    """

    start_ns: int
    durations: list[OpenDuration] = field(default_factory=list)
    orders: list[tuple[Line, Line, bool]] = field(default_factory=list)
    is_linear: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A time after a step's start, depending on its open duration."""

    fixed_ns: int
    after_ns: int

    def at(self, duration_ns: int) -> int:
        """Nanoseconds after the start, if the open duration is this."""
        return max(self.fixed_ns, self.after_ns + duration_ns)


class Moment(int):
    """A point in time, in nanoseconds, that remembers its line."""

    line: Line
    origin: Origin

    @classmethod
    def start(cls, origin: Origin) -> Moment:
        """When the step began."""
        return cls._of(origin.start_ns, Line(0, NEVER), origin)

    @classmethod
    def _of(cls, time_ns: int, line: Line, origin: Origin) -> Moment:
        moment = cls(time_ns)
        moment.line = line
        moment.origin = origin
        return moment

    def __add__(self, duration_ns: int) -> Moment:
        time_ns = int.__add__(self, duration_ns)
        line, origin = self.line, self.origin
        if isinstance(duration_ns, OpenDuration):
            origin.durations.append(duration_ns)
            if line.after_ns > NEVER:
                origin.is_linear = False
            return self._of(time_ns, Line(NEVER, line.fixed_ns), origin)
        return self._of(time_ns, _later(line, duration_ns), origin)

    __radd__ = __add__

    def __le__(self, other: Any) -> bool:
        outcome = int.__le__(self, other)
        self.origin.orders.append((self.line, line_of(other, self.origin), outcome))
        return outcome


def _later(line: Line, duration_ns: int) -> Line:
    after_ns = line.after_ns + duration_ns if line.after_ns > NEVER else NEVER
    return Line(line.fixed_ns + duration_ns if line.fixed_ns > NEVER else NEVER, after_ns)


def line_of(time_ns: int, origin: Origin) -> Line:
    """The line of a moment, or of a time from before the step."""
    return time_ns.line if isinstance(time_ns, Moment) else Line(int(time_ns) - origin.start_ns, NEVER)


def latest(first_ns: int, second_ns: int) -> int:
    """The later of two times; like ``max``, but moments stay moments."""
    later_ns = first_ns if int.__ge__(first_ns, second_ns) else second_ns
    moment = first_ns if isinstance(first_ns, Moment) else second_ns
    if not isinstance(moment, Moment):
        return later_ns
    one, other = line_of(first_ns, moment.origin), line_of(second_ns, moment.origin)
    line = Line(max(one.fixed_ns, other.fixed_ns), max(one.after_ns, other.after_ns))
    return Moment._of(int(later_ns), line, moment.origin)

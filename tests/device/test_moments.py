"""Times with an open duration: the same number as without, and right for every other duration."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.device.clock import Clock
from npusim.device.moments import NEVER, Line, Moment, OpenDuration, Origin, latest, line_of
from npusim.device.streams import Streams

START_NS = 1000


def again(lens, cached_lens):
    return sum(lens) + sum(cached_lens)


def run(program, clock, streams, second, duration):
    """A host that queues work on two streams and waits, as a step does."""
    first = streams.default_stream
    events, outcomes = [], []
    for action, number in program:
        stream = (first, second)[number % 2]
        if action == "spend":
            clock.spend(number)
        elif action == "work":
            streams.enqueue(stream, number)
        elif action == "open":
            streams.enqueue(first, duration)
            program = [step for step in program if step[0] != "open"]
        elif action == "record":
            events.append(streams.record_event(stream))
        elif action == "wait" and events:
            streams.wait_event(stream, events[number % len(events)])
        elif action == "query" and events:
            outcomes.append(streams.query(events[number % len(events)]))
        elif action == "synchronize":
            streams.synchronize_stream(stream)
    return outcomes


def world():
    clock = Clock()
    clock.spend(START_NS)
    streams = Streams(clock)
    return clock, streams, streams.create()


ACTIONS = st.tuples(
    st.sampled_from(["spend", "work", "record", "wait", "query", "synchronize"]), st.integers(min_value=0, max_value=40)
)


@settings(max_examples=60)
@given(before=st.lists(ACTIONS, max_size=12), after=st.lists(ACTIONS, max_size=12), other=st.integers(0, 200))
def test_lines_say_what_happens_with_another_duration(before, after, other):
    program = [*before, ("open", 0), *after]
    clock, streams, second = world()
    origin = Origin(START_NS)
    clock.replace({0: Moment.start(origin)})
    outcomes = run(program, clock, streams, second, OpenDuration(17, again))
    assert origin.is_linear
    assert origin.durations == [17]

    plain_clock, plain_streams, plain_second = world()
    assert run(program, plain_clock, plain_streams, plain_second, 17) == outcomes
    assert clock.now_ns == plain_clock.now_ns

    other_clock, other_streams, other_second = world()
    other_outcomes = run(program, other_clock, other_streams, other_second, other)
    assert START_NS + line_of(clock.now_ns, origin).at(other) == other_clock.now_ns
    for stream, moment in streams.take_moments():
        assert START_NS + moment.line.at(other) == other_streams._busy_until_ns[stream]
    orders = [first.at(other) <= second_.at(other) for first, second_, _ in origin.orders]
    # Events from before the step are plain numbers and always done, so they are not among the orders.
    assert orders == other_outcomes


def test_moments_are_numbers():
    origin = Origin(5)
    moment = Moment.start(origin) + 3
    assert (moment, str(moment), moment - 6, moment / 4) == (8, "8", 2, 2.0)
    assert type(moment - 6) is int
    assert moment.line == Line(3, NEVER)


def test_a_second_open_duration_is_noticed():
    origin = Origin(0)
    opened = Moment.start(origin) + OpenDuration(4, again)
    assert opened.line == Line(NEVER, 0)
    assert origin.is_linear
    assert opened + OpenDuration(4, again) == 8
    assert not origin.is_linear


def test_latest_of_numbers_is_a_number():
    assert latest(3, 5) == latest(5, 3) == 5
    assert type(latest(OpenDuration(3, again), 2)) is not Moment
    origin = Origin(10)
    joined = latest(Moment.start(origin) + 2, 25)
    assert (joined, joined.line) == (25, Line(15, NEVER))

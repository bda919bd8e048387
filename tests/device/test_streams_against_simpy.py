"""Streams by sums and maxima reach the times that SimPy's processes reach, for any program."""

from __future__ import annotations

import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.device.clock import Clock
from npusim.device.streams import Streams

NUM_STREAMS = 3
STREAMS = st.integers(0, NUM_STREAMS - 1)
TIMES = st.integers(0, 50)
EVENTS = st.integers(0, 5)
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), STREAMS, TIMES),
        st.tuples(st.just("spend"), TIMES),
        st.tuples(st.just("record"), STREAMS),
        st.tuples(st.just("wait"), STREAMS, EVENTS),
        st.tuples(st.just("synchronize"), EVENTS),
        st.tuples(st.just("idle"), STREAMS),
    ),
    max_size=40,
)


class Processes:
    """A host and streams as processes that hand each other work and events."""

    def __init__(self, program):
        self.env = simpy.Environment()
        self.queues = [simpy.Store(self.env) for _ in range(NUM_STREAMS)]
        self.done = []
        for queue in self.queues:
            self.env.process(self.stream(queue))
        self.env.run(self.env.process(self.host(program)))
        self.host_ns = self.env.now
        self.env.run()
        self.event_ns = [event.value for event in self.done]

    def stream(self, queue):
        while True:
            kind, argument = yield queue.get()
            if kind == "work":
                yield self.env.timeout(argument)
            elif kind == "wait":
                yield argument
            else:
                argument.succeed(self.env.now)

    def record(self, stream):
        event = self.env.event()
        self.queues[stream].put(("record", event))
        return event

    def host(self, program):
        for kind, *arguments in program:
            if kind == "spend":
                yield self.env.timeout(arguments[0])
            elif kind == "work":
                self.queues[arguments[0]].put(("work", arguments[1]))
            elif kind == "record":
                self.done.append(self.record(arguments[0]))
            elif kind == "idle":
                yield self.record(arguments[0])
            elif self.done:
                event = self.done[arguments[-1] % len(self.done)]
                if kind == "wait":
                    self.queues[arguments[0]].put(("wait", event))
                else:
                    yield event


def by_sums(program):
    clock = Clock()
    streams = Streams(clock, first_handle=0)
    for _ in range(NUM_STREAMS - 1):
        streams.create()
    events = []
    for kind, *arguments in program:
        if kind == "spend":
            clock.spend(arguments[0])
        elif kind == "work":
            streams.enqueue(*arguments)
        elif kind == "record":
            events.append(streams.record_event(arguments[0]))
        elif kind == "idle":
            streams.synchronize_stream(arguments[0])
        elif events:
            event = events[arguments[-1] % len(events)]
            if kind == "wait":
                streams.wait_event(arguments[0], event)
            else:
                streams.synchronize(event)
    return clock.now_ns, [event.time_ns for event in events]


@settings(max_examples=60, deadline=None)
@given(PROGRAMS)
def test_same_times(program):
    processes = Processes(program)
    assert by_sums(program) == (processes.host_ns, processes.event_ns)

"""Ranks of one process: one at a time, always in the same order, and never waiting for ever."""

from __future__ import annotations

import re
import threading

import pytest

from npusim.errors import CollectiveMismatchError, RankMissingError, WorldError
from npusim.hccl.ranks import LoneRank, Ranks


class Script:
    """Ranks that write down what they do and meet where they are told to."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.log: list[str] = []
        self.meetings: dict[tuple[str, int], int] = {}

    def note(self, text: str) -> None:
        self.log.append(f"{self.ranks.current}{text}")

    def meet(
        self, group: str = "world", *, rank: int | None = None, size: int = 2, operation: str = "sum"
    ) -> list[int]:
        me = self.ranks.current
        number = self.meetings[group, me] = self.meetings.get((group, me), 0) + 1
        seen: list[int] = []
        group_rank = me if rank is None else rank

        def finish(payloads: list[list[int]], receivers) -> None:
            self.log.append(f"finish by {me}")
            for payload in payloads:
                payload.extend(range(len(receivers)))

        self.ranks.meet((group, number), group_rank, size, operation, seen, finish)
        return seen

    def run(self, *functions):
        return self.ranks.run(functions)


@pytest.fixture
def script():
    return Script()


def test_results_come_by_rank(script):
    assert script.run(lambda: "a", lambda: "b", lambda: "c") == ["a", "b", "c"]
    assert script.ranks.current == 0


def test_a_rank_runs_until_it_waits(script):
    def rank() -> list[int]:
        script.note("begins")
        seen = script.meet()
        script.note("goes on")
        return seen

    assert script.run(rank, rank) == [[0, 1], [0, 1]]
    assert script.log == ["0begins", "1begins", "finish by 1", "1goes on", "0goes on"]


def test_the_order_is_always_the_same(script):
    def rank() -> None:
        for step in range(3):
            script.note(f"step {step}")
            script.meet(size=4)

    logs = []
    for _ in range(5):
        script.log.clear()
        script.meetings.clear()
        script.run(*[rank] * 4)
        logs.append(list(script.log))
    assert all(log == logs[0] for log in logs)
    assert logs[0][:5] == ["0step 0", "1step 0", "2step 0", "3step 0", "finish by 3"]


def test_exactly_one_rank_runs_at_any_time(script):
    running, most = [], []

    def rank() -> None:
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            running.pop()
            script.meet(size=8)

    script.run(*[rank] * 8)
    assert max(most) == 1


def test_subgroups_meet_on_their_own(script):
    def rank(number: int) -> list[int]:
        seen = script.meet(f"pair {number // 2}", rank=number % 2)
        return seen + script.meet("all", size=4)

    assert script.run(*[lambda number=number: rank(number) for number in range(4)]) == [[0, 1, 0, 1, 2, 3]] * 4


def test_a_group_of_one_meets_itself_also_outside_of_run(script):
    assert script.meet(size=1, rank=0) == [0]
    assert script.run(lambda: script.meet("me", size=1, rank=0)) == [[0]]


def test_several_outside_of_run(script):
    with pytest.raises(RankMissingError, match=r"^sum of 2 ranks was called outside of SimWorld\.run_ranks"):
        script.meet()


def test_different_operations(script):
    text = "rank 1 calls max on world, collective 1 where group rank 0 calls sum"
    with pytest.raises(CollectiveMismatchError, match=f"^{re.escape(text)}") as caught:
        script.run(lambda: script.meet(operation="sum"), lambda: script.meet(operation="max"))
    assert caught.value.__notes__ == ["raised on rank 1 of 2"]


def test_a_rank_that_never_arrives(script):
    text = "rank 0 waits in sum on world, collective 1 for ranks of the group that never arrive: 1"
    with pytest.raises(RankMissingError, match=f"^{re.escape(text)}") as caught:
        script.run(script.meet, lambda: None)
    assert caught.value.__notes__ == ["raised on rank 0 of 2"]


def test_ranks_that_wait_for_each_other(script):
    with pytest.raises(RankMissingError, match=r"^rank 0 waits in sum on a, collective 1 for .* never arrive: 1"):
        script.run(lambda: script.meet("a"), lambda: script.meet("b"))


def test_the_error_that_others_wait_for_is_raised(script):
    def fail() -> None:
        script.note("fails")
        raise ZeroDivisionError("the reason")

    with pytest.raises(ZeroDivisionError, match="the reason") as caught:
        script.run(script.meet, fail)
    assert caught.value.__notes__ == ["raised on rank 1 of 2"]


def test_of_several_errors_the_first_in_time_is_raised(script):
    def late() -> None:
        script.meet(size=3)
        raise ValueError("late")

    def early() -> None:
        script.meet(size=3)
        raise KeyError("early")

    # rank 2 is the last to arrive, so it goes on first
    with pytest.raises(KeyError, match="early"):
        script.run(late, late, early)


def test_an_error_while_finishing_is_the_last_ranks(script):
    def rank() -> None:
        def finish(payloads, receivers) -> None:
            raise ValueError("sizes differ")

        script.ranks.meet("g", script.ranks.current, 2, "sum", None, finish)

    with pytest.raises(ValueError, match="sizes differ") as caught:
        script.run(rank, rank)
    assert caught.value.__notes__ == ["raised on rank 1 of 2"]


def test_ranks_can_run_again_after_an_error(script):
    with pytest.raises(RankMissingError):
        script.run(script.meet, lambda: None)
    script.meetings.clear()
    assert script.run(script.meet, script.meet) == [[0, 1], [0, 1]]


def test_threads_end(script):
    before = threading.active_count()
    with pytest.raises(RankMissingError):
        script.run(script.meet, script.meet, script.meet, lambda: None)
    assert threading.active_count() == before


def test_a_rank_cannot_start_others(script):
    with pytest.raises(WorldError, match="ranks are running already; a rank cannot start others"):
        script.run(lambda: script.run(lambda: None))


def test_no_ranks(script):
    with pytest.raises(WorldError, match="there are no ranks to run"):
        script.run()


def test_other_ranks_run_or_not(script):
    assert not script.ranks.are_several
    assert script.run(lambda: script.ranks.are_several) == [False]
    assert script.run(*[lambda: script.ranks.are_several] * 2) == [True, True]


def test_payloads_are_let_go_when_the_meeting_is_over(script):
    import weakref

    class Payload:
        pass

    alive: list[bool] = []

    def rank() -> None:
        payload = Payload()
        reference = weakref.ref(payload)
        script.ranks.meet("g", script.ranks.current, 2, "sum", payload, lambda payloads, receivers: None)
        del payload
        if script.ranks.current == 1:  # rank 0 still waits for its turn
            alive.append(reference() is not None)

    script.run(rank, rank)
    assert alive == [False]


# ---- one rank alone


def test_a_lone_rank_stands_for_all():
    ranks = LoneRank(3)
    assert ranks.current == 3
    assert ranks.are_several
    assert ranks.is_lone
    seen = []
    ranks.meet("g", 1, 4, "sum", "mine", lambda payloads, receivers: seen.append((payloads, list(receivers))))
    assert seen == [(["mine"] * 4, [1])]


def test_a_lone_rank_runs_one_function():
    ranks = LoneRank(3)
    assert ranks.run([lambda: ranks.current]) == [3]
    with pytest.raises(WorldError, match="this world has only rank 3, got 2 functions to run"):
        ranks.run([lambda: None] * 2)

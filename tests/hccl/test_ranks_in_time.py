"""Virtual time of several ranks: they meet in collectives, in replays and in xlite; one may be slow, or hang."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from npusim import SimWorld
from npusim.device.cost import BARE_LOOP, HOST_COLLECTIVE_NS, CostModel
from npusim.device.profile import load_profile
from npusim.testing.faults import NpuFaults

pytestmark = [
    pytest.mark.sim_only("ranks of a world"),
    pytest.mark.filterwarnings("ignore:.*using the device under current context:UserWarning"),
]
COSTS = CostModel(load_profile("a3-64g"))
LAUNCH_NS = BARE_LOOP.operator_ns
BIG = 256 << 20
FILL_NS = COSTS.vector_ns(BIG)
COLLECTIVE_NS = COSTS.collective_ns("all_reduce", 4 * 1024, 2)


def run(body, *, num_ranks=2, environment=None, faults=lambda faults: None, backend="hccl"):
    """What ``body(rank)`` returned on each rank, and the world."""
    store = dist.HashStore()

    def rank(number: int):
        torch.npu.set_device(number)
        dist.init_process_group(backend, rank=number, world_size=num_ranks, store=store)
        return body(number)

    with SimWorld(num_devices=num_ranks, environment=environment or {}) as world:
        faults(NpuFaults(world))
        return world.run_ranks([lambda number=number: rank(number) for number in range(num_ranks)]), world


def now_ns() -> int:
    torch.npu.synchronize()
    event = torch.npu.Event(enable_timing=True)
    event.record()
    return event._recorded.time_ns


def unequal(number: int) -> int:
    """An all-reduce that rank 1 reaches later than rank 0, by a long kernel."""
    block = torch.empty(BIG, dtype=torch.uint8, device="npu")
    summand = torch.empty(1024, device="npu")
    if number == 1:
        block.fill_(1)
    dist.all_reduce(summand)
    return now_ns()


def test_a_collective_starts_when_the_last_rank_is_ready_and_ends_for_all_at_once():
    (first, second), world = run(unequal)
    assert first == second == LAUNCH_NS + FILL_NS + COLLECTIVE_NS
    assert world.clock.now_ns == first


def test_the_host_goes_on_while_others_are_on_their_way():
    def body(number):
        block = torch.empty(BIG, dtype=torch.uint8, device="npu")
        if number == 1:
            block.fill_(1)
        dist.all_reduce(torch.empty(1024, device="npu"))
        return dist.group.WORLD._ranks._clock.now_ns

    (first, second), _ = run(body)
    assert (first, second) == (LAUNCH_NS, 2 * LAUNCH_NS)


def test_a_barrier_makes_hosts_wait():
    def body(number):
        if number == 1:
            torch.empty(BIG, dtype=torch.uint8, device="npu").fill_(1)
        dist.barrier()
        return dist.group.WORLD._ranks._clock.now_ns

    (first, second), _ = run(body)
    assert first == second > FILL_NS


def test_host_tensors_are_exchanged_by_the_hosts():
    def body(number):
        if number == 1:
            torch.empty(1, device="npu").fill_(1)
        dist.all_reduce(torch.ones(4))
        return dist.group.WORLD._ranks._clock.now_ns

    times, _ = run(body, backend="cpu:gloo,npu:hccl")
    assert times == [LAUNCH_NS + HOST_COLLECTIVE_NS] * 2


def test_a_slow_rank_holds_up_the_others():
    (first, second), _ = run(unequal, faults=lambda faults: faults.slow_down(2.0, device_index=1))
    assert first == second == LAUNCH_NS + 2 * FILL_NS + COLLECTIVE_NS


def test_a_replayed_graph_meets_the_ranks_and_goes_at_the_pace_of_the_slowest():
    def body(number):
        block = torch.empty(BIG, dtype=torch.uint8, device="npu")
        summand = torch.empty(1024, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            block.fill_(1)
            dist.all_reduce(summand)
        begin = now_ns()
        if number == 0:
            block.fill_(2)
        graph.replay()
        return begin, now_ns()

    ((begin, first), (_, second)), _ = run(body)
    assert first == second == begin + LAUNCH_NS + 2 * FILL_NS + COLLECTIVE_NS
    ((begin, first), (_, second)), _ = run(body, faults=lambda faults: faults.slow_down(3.0, device_index=1))
    assert first == second == begin + LAUNCH_NS + FILL_NS + 3 * (FILL_NS + COLLECTIVE_NS)


@pytest.mark.parametrize(("timeout", "limit_s"), [(None, 1836), ("60", 60)])
def test_a_rank_that_hangs_for_too_long_makes_the_collective_fail(timeout, limit_s):
    environment = {} if timeout is None else {"HCCL_EXEC_TIMEOUT": timeout}
    text = (
        "NPU function error: AclrtSynchronizeStreamWithTimeout, error code is 507048.*"
        "EI0002: The wait execution of the Notify register times out"
    )
    with pytest.raises(RuntimeError, match=re.compile(text, re.DOTALL)) as caught:
        run(unequal, environment=environment, faults=lambda faults: faults.hang(limit_s + 1, device_index=1))
    assert any(f"HCCL_EXEC_TIMEOUT allows {limit_s} s" in note for note in caught.value.__notes__)

    def hang(faults):
        faults.hang(limit_s - 1, device_index=1)

    (first, second), _ = run(unequal, environment=environment, faults=hang)
    assert first == second > (limit_s - 1) * 10**9


def test_without_a_limit_ranks_wait_for_ever():
    run(unequal, environment={"HCCL_EXEC_TIMEOUT": "0"}, faults=lambda faults: faults.hang(1e6, device_index=1))


def test_another_process_grows_at_its_time():
    def body(number):
        free = [torch.npu.mem_get_info()[0]]
        for _ in range(3):
            torch.npu.current_stream().synchronize()
            torch.empty(1, device="npu").fill_(1)
            free.append(torch.npu.mem_get_info()[0])
        return [before - after for before, after in pairwise(free)]

    def plan(faults):
        faults.other_process(1 << 30, name="trainer", device_index=1, at=2 * LAUNCH_NS / 1e9)

    (_, grown), world = run(body, faults=plan)
    assert grown[1] == 1 << 30
    assert grown[2] == 0
    assert world.cards[1].other_processes["trainer"].num_bytes == 1 << 30


def test_each_call_of_the_ranks_starts_where_the_last_one_ended():
    with SimWorld(num_devices=2, environment={}) as world:

        def work(number):
            torch.npu.set_device(number)
            if number == 1:
                torch.empty(BIG, dtype=torch.uint8, device="npu").fill_(1)
                torch.npu.synchronize()
            return world.clock.now_ns

        calls = [lambda: work(0), lambda: work(1)]
        assert world.run_ranks(calls) == [0, LAUNCH_NS + FILL_NS]
        assert world.run_ranks(calls) == [LAUNCH_NS + FILL_NS, 2 * (LAUNCH_NS + FILL_NS)]
        assert world.host_clock(1).now() == 2 * (LAUNCH_NS + FILL_NS) / 1e9


# ---- reproducible


def program():
    block = torch.empty(BIG, dtype=torch.uint8, device="npu")
    side = torch.npu.Stream()
    for number in range(3):
        block.fill_(number)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            block.sum()
    block[0].item()


def test_equal_programs_take_equal_times_and_leave_equal_logs():
    seen = set()
    for _ in range(2):
        with SimWorld(environment={}) as world:
            program()
            seen.add((world.clock.now_ns, world.event_log.digest))
    assert len(seen) == 1

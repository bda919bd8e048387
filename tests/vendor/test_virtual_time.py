"""``torch.npu`` in virtual time: what runs side by side, who waits for whom, and when memory comes back."""

from __future__ import annotations

import pytest
import torch

from npusim.device.cost import BARE_LOOP, GRAPH_TASK_NS, CostModel
from npusim.device.profile import load_profile

pytestmark = pytest.mark.sim_only("virtual time")
MIB = 1 << 20
COSTS = CostModel(load_profile("a3-64g"))
LAUNCH_NS = BARE_LOOP.operator_ns
BIG = 256 * MIB
FILL_NS = COSTS.vector_ns(BIG)
"""A fill of BIG bytes: far longer than its launch."""


@pytest.fixture(autouse=True)
def default_stream_again(npu_world):
    yield
    torch.npu.set_stream(torch.npu.default_stream())


@pytest.fixture
def block():
    return torch.empty(BIG, dtype=torch.uint8, device="npu")


def test_the_host_runs_ahead_until_it_waits(npu_world, block):
    block.fill_(1)
    block.fill_(2)
    assert npu_world.clock.now_ns == 2 * LAUNCH_NS
    assert not torch.npu.current_stream().query()
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == LAUNCH_NS + 2 * FILL_NS
    assert torch.npu.current_stream().query()


def test_a_device_that_is_faster_than_its_host_waits_for_launches(npu_world):
    small = torch.empty(1, device="npu")
    for _ in range(3):
        small.fill_(1)
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == 3 * LAUNCH_NS + COSTS.vector_ns(4)


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor[:1].cpu(),
        lambda tensor: torch.empty(1, dtype=torch.uint8).copy_(tensor[:1]),
        lambda tensor: tensor[:1].tolist(),
    ],
)
def test_reading_waits_for_the_stream(npu_world, block, read):
    block.fill_(1)
    read(block)
    assert npu_world.clock.now_ns == LAUNCH_NS + FILL_NS + COSTS.device_to_host_ns(1)


def test_a_copy_that_does_not_block(npu_world, block):
    block.fill_(1)
    host = block[:1].to("cpu", non_blocking=True)
    done = torch.npu.current_stream().record_event()
    assert npu_world.clock.now_ns == 2 * LAUNCH_NS
    assert not done.query()
    done.synchronize()
    assert npu_world.clock.now_ns == LAUNCH_NS + FILL_NS + COSTS.device_to_host_ns(1)
    assert host.tolist() == [1]


@pytest.mark.parametrize(("pinned", "waits"), [(False, True), (True, False)])
def test_copies_to_the_device_wait_unless_pinned(npu_world, pinned, waits):
    host = torch.zeros(BIG, dtype=torch.uint8, pin_memory=pinned)
    host.to("npu", non_blocking=True)
    taken_ns = COSTS.host_to_device_ns(BIG)
    assert npu_world.clock.now_ns == LAUNCH_NS + (taken_ns if waits else 0)


@pytest.mark.parametrize("call", [torch.nonzero, lambda x: x[x > 0], lambda x: torch.equal(x, x)])
def test_results_of_a_size_that_the_host_must_know_are_waited_for(npu_world, call):
    values = torch.arange(4, device="npu")
    busy = torch.empty(BIG, dtype=torch.uint8, device="npu")
    begin_ns = npu_world.clock.now_ns
    busy.fill_(0)
    call(values)
    assert npu_world.clock.now_ns > begin_ns + FILL_NS


def test_streams_overlap(npu_world, block):
    side, other = torch.npu.Stream(), torch.empty_like(block)
    block.fill_(1)
    with torch.npu.stream(side):
        other.fill_(1)
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == 2 * LAUNCH_NS + FILL_NS


def test_wait_stream_puts_work_behind_that_of_another(npu_world, block):
    side = torch.npu.Stream()
    block.fill_(1)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        block.fill_(2)
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == LAUNCH_NS + 2 * FILL_NS


def test_elapsed_time_is_that_of_the_work_between(npu_world, block):
    events = [torch.npu.Event(enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
        block.fill_(1)
    assert events[1].elapsed_time(events[2]) == FILL_NS / 1e6
    assert events[2].elapsed_time(events[1]) == -FILL_NS / 1e6
    again = events[0]
    again.record()  # a second record replaces the first
    assert events[2].elapsed_time(again) == FILL_NS / 1e6


def test_products_take_their_time(npu_world):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="npu")
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    begin.record()
    x @ x
    end.record()
    tflops = 2 * 4096**3 / (begin.elapsed_time(end) / 1e3) / 1e12
    assert 270 < tflops < 320  # a 910B2 reaches 315


def test_a_cache_is_not_read_to_be_written_to(npu_world):
    cache = torch.empty(1024, 128, 8, 128, dtype=torch.bfloat16, device="npu")
    rows = torch.empty(4, 8, 128, dtype=torch.bfloat16, device="npu")
    slots = torch.zeros(4, dtype=torch.int32, device="npu")
    torch.npu.synchronize()
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    begin.record()
    torch.ops.atb._npu_reshape_and_cache(rows, rows, cache, cache, slots)
    end.record()
    assert begin.elapsed_time(end) < 0.03


def test_attention_reads_the_keys_of_its_sequences(npu_world):
    def decode_ms(context):
        query = torch.empty(8, 16, 128, dtype=torch.bfloat16, device="npu")
        cache = torch.empty(2048, 128, 256, dtype=torch.bfloat16, device="npu")
        table = torch.zeros(8, 128, dtype=torch.int32, device="npu")
        begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        torch.empty(BIG, dtype=torch.uint8, device="npu").fill_(1)  # keeps the device busy during the launch
        begin.record()
        torch.ops.npu.npu_fused_infer_attention_score(
            query,
            cache,
            cache,
            actual_seq_lengths=list(range(1, 9)),
            actual_seq_lengths_kv=[context] * 8,
            block_table=table,
            num_heads=16,
            num_key_value_heads=2,
            input_layout="TND",
            block_size=128,
        )
        end.record()
        return begin.elapsed_time(end)

    assert decode_ms(16384) == pytest.approx(0.173, rel=0.05)  # vllm-ascend #11266: 171 to 173 us
    assert decode_ms(8192) < 0.6 * decode_ms(16384)


# ---- memory


def test_memory_that_another_stream_uses_comes_back_when_that_is_done(npu_world):
    side, block = torch.npu.Stream(), torch.empty(BIG, dtype=torch.uint8, device="npu")
    with torch.npu.stream(side):
        block.fill_(1)
    address = block.data_ptr()
    block.record_stream(side)
    del block
    waiting = torch.empty(BIG, dtype=torch.uint8, device="npu")
    assert waiting.data_ptr() != address
    npu_world.host_clock().charge(1.0)  # long enough, and nobody synchronizes
    assert torch.empty(BIG, dtype=torch.uint8, device="npu").data_ptr() == address


# ---- captured graphs


def captured(run):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        run()
    return graph


def test_a_replay_takes_the_time_of_its_operators_and_one_launch(npu_world, block):
    graph = captured(lambda: [block.fill_(number) for number in range(5)])
    assert torch.npu.current_stream().query()  # nothing of it ran
    begin_ns = npu_world.clock.now_ns
    graph.replay()
    assert npu_world.clock.now_ns == begin_ns + LAUNCH_NS
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == begin_ns + LAUNCH_NS + 5 * FILL_NS


def test_streams_of_a_graph_overlap_in_its_replay(npu_world, block):
    side, other = torch.npu.Stream(), torch.empty_like(block)

    def run():
        main = torch.npu.current_stream()
        side.wait_stream(main)
        block.fill_(1)
        with torch.npu.stream(side):
            other.fill_(1)
            other.fill_(2)
        main.wait_stream(side)

    graph = captured(run)
    begin_ns = npu_world.clock.now_ns
    graph.replay()
    torch.npu.synchronize()
    assert npu_world.clock.now_ns == begin_ns + LAUNCH_NS + 2 * FILL_NS


def test_updated_arguments_change_how_long_a_replay_takes(npu_world, block):
    handles, event, update_stream = [], torch.npu.ExternalEvent(), torch.npu.Stream()

    def run():
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        block.fill_(1)
        handles.append(torch.npu.graph_task_group_end(stream))

    graph = captured(run)
    for _ in range(2):
        begin_ns = npu_world.clock.now_ns
        graph.replay()
        with torch.npu.stream(update_stream):
            torch.npu.graph_task_update_begin(update_stream, handles[0])
            block[: BIG // 2].fill_(1)
            torch.npu.graph_task_update_end(update_stream)
        event.record(update_stream)
        torch.npu.synchronize()
        assert npu_world.clock.now_ns == begin_ns + LAUNCH_NS + GRAPH_TASK_NS + COSTS.vector_ns(BIG // 2)

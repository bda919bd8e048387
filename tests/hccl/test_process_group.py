"""torch.distributed between ranks of one process: values, refusals, memory."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from npusim import SimWorld
from npusim.device.ledger import Owner
from npusim.errors import CollectiveMismatchError, RankMissingError, UnmodelledCallError

pytestmark = [
    pytest.mark.sim_only("ranks of a world"),
    pytest.mark.filterwarnings("ignore:.*using the device under current context:UserWarning"),
]
MIB = 1 << 20
MODES = pytest.mark.parametrize("values", ["shape", "real"])
SIZES = pytest.mark.parametrize("num_ranks", [1, 2, 4])


def run(num_ranks, body, *, values="shape", environment=None, backend="hccl"):
    """What ``body(rank)`` returned on each rank of a fresh world with a default group."""
    store = dist.HashStore()

    def rank(number: int):
        torch.npu.set_device(number)
        dist.init_process_group(backend, rank=number, world_size=num_ranks, store=store)
        return body(number)

    with SimWorld(num_devices=num_ranks, values=values, environment=environment or {}) as world:
        return world.run_ranks([lambda number=number: rank(number) for number in range(num_ranks)])


def numbers(rank: int, count: int = 4, **settings) -> torch.Tensor:
    return torch.arange(count, device="npu", **settings) + 10 * rank


# ---- values


@MODES
@SIZES
def test_all_reduce(num_ranks, values):
    expected = [sum(10 * rank + i for rank in range(num_ranks)) for i in range(4)]

    def body(rank):
        tensor = numbers(rank)
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert run(num_ranks, body, values=values) == [expected] * num_ranks


@pytest.mark.parametrize(
    ("op", "expected"),
    [("SUM", [10, 14]), ("MAX", [10, 12]), ("MIN", [0, 2]), ("PRODUCT", [0, 24]), ("AVG", [5, 7])],
)
def test_reductions(op, expected):
    def body(rank):
        tensor = torch.tensor([10 * rank, 10 * rank + 2], device="npu")
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        return tensor.tolist()

    assert run(2, body) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.uint8, torch.bool])
def test_types_stay(dtype):
    def body(rank):
        tensor = torch.tensor([1, 0, 1 - rank], device="npu").to(dtype)
        dist.all_reduce(tensor)
        return tensor.dtype, tensor.float().tolist()

    sums = [1.0, 0.0, 1.0] if dtype is torch.bool else [2.0, 0.0, 1.0]
    assert run(2, body) == [(dtype, sums)] * 2


@SIZES
def test_reduce(num_ranks):
    root = num_ranks - 1

    def body(rank):
        tensor = torch.tensor([rank + 1], device="npu")
        dist.reduce(tensor, root)
        return tensor.item()

    expected = [rank + 1 for rank in range(num_ranks)]
    expected[root] = sum(expected)
    assert run(num_ranks, body) == expected


@MODES
@SIZES
def test_broadcast_into_memory_that_nobody_wrote(num_ranks, values):
    def body(rank):
        tensor = numbers(7) if rank == num_ranks - 1 else torch.empty(4, dtype=torch.int64, device="npu")
        dist.broadcast(tensor, num_ranks - 1)
        return tensor.tolist()

    assert run(num_ranks, body, values=values) == [[70, 71, 72, 73]] * num_ranks


@MODES
@SIZES
def test_all_gather(num_ranks, values):
    def body(rank):
        part = numbers(rank).view(2, 2)
        whole = torch.empty(2 * num_ranks, 2, dtype=torch.int64, device="npu")
        dist.all_gather_single(whole, part)
        listed = [torch.empty_like(part) for _ in range(num_ranks)]
        dist.all_gather(listed, part)
        return whole.tolist(), torch.cat(listed).tolist()

    expected = [
        row for rank in range(num_ranks) for row in ([10 * rank, 10 * rank + 1], [10 * rank + 2, 10 * rank + 3])
    ]
    assert run(num_ranks, body, values=values) == [(expected, expected)] * num_ranks


def test_all_gather_of_different_sizes():
    def body(rank):
        part = numbers(rank, 2 + rank)
        listed = [torch.empty(2 + other, dtype=torch.int64, device="npu") for other in range(2)]
        dist.all_gather(listed, part)
        return [tensor.tolist() for tensor in listed]

    assert run(2, body) == [[[0, 1], [10, 11, 12]]] * 2


@SIZES
def test_reduce_scatter(num_ranks):
    def body(rank):
        whole = torch.arange(2 * num_ranks, device="npu") * (rank + 1)
        mine = torch.empty(2, dtype=torch.int64, device="npu")
        dist.reduce_scatter_single(mine, whole)
        listed = torch.empty(2, dtype=torch.int64, device="npu")
        dist.reduce_scatter(listed, list(whole.chunk(num_ranks)))
        return mine.tolist(), listed.tolist()

    factor = sum(range(1, num_ranks + 1))
    shares = [[2 * rank * factor, (2 * rank + 1) * factor] for rank in range(num_ranks)]
    assert run(num_ranks, body) == [(share, share) for share in shares]


@MODES
@SIZES
def test_all_to_all(num_ranks, values):
    def body(rank):
        source = torch.arange(2 * num_ranks, device="npu") + 100 * rank
        target = torch.empty_like(source)
        dist.all_to_all_single(target, source)
        listed = [torch.empty(2, dtype=torch.int64, device="npu") for _ in range(num_ranks)]
        dist.all_to_all(listed, list(source.chunk(num_ranks)))
        return target.tolist(), torch.cat(listed).tolist()

    def received(rank):
        return [100 * sender + 2 * rank + i for sender in range(num_ranks) for i in range(2)]

    assert run(num_ranks, body, values=values) == [(received(rank),) * 2 for rank in range(num_ranks)]


def test_uneven_all_to_all():
    sends = [[1, 2, 0], [0, 3, 1], [2, 2, 2]]

    def body(rank):
        source = torch.arange(sum(sends[rank]), device="npu") + 10 * rank
        receives = [sends[sender][rank] for sender in range(3)]
        target = torch.empty(sum(receives), dtype=torch.int64, device="npu")
        dist.all_to_all_single(target, source, receives, sends[rank])
        return target.tolist()

    assert run(3, body) == [[0, 20, 21], [1, 2, 10, 11, 12, 22, 23], [13, 24, 25]]


def test_objects():
    def body(rank):
        given = [{"from": 0}] if rank == 0 else [None]
        dist.broadcast_object_list(given, 0)
        gathered = [None, None]
        dist.all_gather_object(gathered, "x" * (rank + 1))
        return given, gathered

    assert run(2, body) == [([{"from": 0}], ["x", "xx"])] * 2


def test_values_that_nobody_computed_stay_unknown():
    from npusim.errors import UncomputedValueError

    def body(rank):
        tensor = numbers(0) if rank == 0 else torch.empty(4, dtype=torch.int64, device="npu")
        dist.all_reduce(tensor)
        with pytest.raises(UncomputedValueError):
            tensor.tolist()

    run(2, body)


def test_functional_collectives():
    functional = torch.ops._c10d_functional

    def body(rank):
        reduced = functional.all_reduce(numbers(rank), "sum", "0")
        gathered = functional.all_gather_into_tensor(numbers(rank, 1), 2, "0")
        scattered = functional.reduce_scatter_tensor(numbers(rank, 2), "sum", 2, "0")
        exchanged = functional.all_to_all_single(numbers(rank, 2), [1, 1], [1, 1], "0")
        sent = functional.wait_tensor(functional.broadcast(numbers(rank, 1), 1, "0"))
        with pytest.raises(UnmodelledCallError, match="this rank has no simulated process group 'x'; there are"):
            functional.all_reduce(sent, "sum", "x")
        return [tensor.tolist() for tensor in (reduced, gathered, scattered, exchanged, sent)]

    assert run(2, body) == [
        [[10, 12, 14, 16], [0, 10], [10], [0, 10], [10]],
        [[10, 12, 14, 16], [0, 10], [12], [1, 11], [10]],
    ]


def test_work_is_done_when_the_call_returns():
    def body(rank):
        tensor = numbers(rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.is_completed()
        assert work.wait()
        return tensor.tolist()

    assert run(2, body) == [[10, 12, 14, 16]] * 2


# ---- groups


def test_subgroups_are_a_matter_of_their_ranks():
    def body(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = groups[rank % 2]
        tensor = torch.tensor([rank], device="npu")
        dist.all_reduce(tensor, group=mine)
        ranks = dist.get_process_group_ranks(mine)
        dist.all_reduce(tensor)
        return tensor.item(), ranks, dist.get_rank(mine)

    assert run(4, body) == [(12, [0, 2], 0), (12, [1, 3], 0), (12, [0, 2], 1), (12, [1, 3], 1)]


def test_names_and_backends():
    def body(rank):
        host = dist.new_group([0, 1], backend="gloo")
        return dist.get_backend(), dist.get_backend(host), dist.group.WORLD.size(), dist.is_initialized()

    assert run(2, body) == [("hccl", "gloo", 2, True)] * 2
    assert not dist.is_initialized()


def test_host_tensors_have_gloo():
    def body(rank):
        host = dist.new_group([0, 1], backend="gloo")
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor, group=host)
        listed = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(listed, torch.tensor([rank]), group=host)
        dist.barrier(group=host)
        given = [rank]
        dist.broadcast_object_list(given, 1, group=host)
        with pytest.raises(RuntimeError, match=r"^No backend type associated with device type npu$"):
            dist.all_reduce(torch.ones(1, device="npu"), group=host)
        return tensor.item(), torch.cat(listed).tolist(), given, torch.npu.memory_reserved()

    assert run(2, body) == [(3, [0, 1], [1], 2 * MIB)] * 2


def test_a_group_of_both_kinds():
    def body(rank):
        host, device = torch.tensor([rank]), torch.tensor([rank], device="npu")
        dist.all_reduce(host)
        dist.all_reduce(device)
        return host.item(), device.item()

    assert run(2, body, backend="cpu:gloo,npu:hccl") == [(1, 1)] * 2


def test_groups_go_with_their_world():
    for _ in range(2):
        assert run(2, lambda rank: dist.get_world_size()) == [2, 2]
        assert not dist.is_initialized()


def test_groups_stay_from_one_run_of_ranks_to_the_next():
    store = dist.HashStore()

    def first(rank):
        torch.npu.set_device(rank)
        dist.init_process_group("hccl", rank=rank, world_size=2, store=store)

    def second(rank):
        tensor = torch.ones(1, device="npu")
        dist.all_reduce(tensor)
        return dist.get_rank(), tensor.device.index, tensor.item()

    with SimWorld(num_devices=2, environment={}) as world:
        world.run_ranks([lambda: first(0), lambda: first(1)])
        assert world.run_ranks([lambda: second(0), lambda: second(1)]) == [(0, 0, 2), (1, 1, 2)]


# ---- refusals


def refused(body, message, *, num_ranks=2):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        run(num_ranks, body)


def test_host_tensors_are_refused():
    refused(lambda rank: dist.all_reduce(torch.ones(1)), "No backend type associated with device type cpu")


def test_strided_tensors_are_refused():
    def strided() -> torch.Tensor:
        return torch.ones(4, 4, device="npu").t()

    for call in (
        lambda rank: dist.all_reduce(strided()),
        lambda rank: dist.broadcast(strided(), 0),
        lambda rank: dist.all_gather_single(torch.empty(8, 4, device="npu"), strided()),
        lambda rank: dist.all_gather([torch.empty(4, 4, device="npu") for _ in range(2)], strided()),
        lambda rank: dist.all_to_all_single(torch.empty(4, 4, device="npu"), strided()),
    ):
        refused(call, "Tensors must be contiguous\n[ERROR] ERR02002 DIST invalid type")


def test_reductions_that_hccl_does_not_have_are_refused():
    refused(
        lambda rank: dist.all_reduce(torch.ones(1, dtype=torch.int64, device="npu"), op=dist.ReduceOp.BAND),
        "Cannot use ReduceOp.BAND with HCCL\n[ERROR] ERR02007 DIST feature not supported",
    )


@pytest.mark.parametrize(
    ("dtype", "name"), [("float64", "at::kDouble"), ("uint8", "at::kByte/at::kBool"), ("bool", "at::kByte/at::kBool")]
)
def test_types_that_reduce_scatter_does_not_take(dtype, name):
    def body(rank):
        kind = getattr(torch, dtype)
        dist.reduce_scatter_single(torch.empty(1, dtype=kind, device="npu"), torch.empty(2, dtype=kind, device="npu"))

    refused(
        body, f"HCCL _reduce_scatter_base: Unsupported data type {name}\n[ERROR] ERR02007 DIST feature not supported"
    )


def test_lists_of_the_wrong_length_are_refused():
    message = "Tensor list input to scatter/gather must match number of collective participants"
    refused(lambda rank: dist.all_gather([torch.empty(1, device="npu")], torch.ones(1, device="npu")), message)


def test_rows_that_do_not_divide_are_refused():
    message = "Tensor's dim 0 does not divide equally across group size\n[ERROR] ERR02001 DIST invalid parameter"
    refused(lambda rank: dist.all_to_all_single(torch.empty(3, device="npu"), torch.ones(3, device="npu")), message)


def test_split_sizes_that_do_not_fit_together_are_refused():
    def body(rank):
        dist.all_to_all_single(torch.empty(2, device="npu"), torch.ones(2, device="npu"), [1, 1], [2, 0])

    refused(body, "rank 0 expects [1, 1] rows of all_to_all on 0, gets [2, 2]")


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: dist.all_reduce(torch.ones(1 + rank, device="npu")),
        lambda rank: dist.all_reduce(torch.ones(1, device="npu", dtype=torch.float16 if rank else torch.float32)),
        lambda rank: dist.all_reduce(torch.ones(1, device="npu"), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        lambda rank: dist.broadcast(torch.ones(1, device="npu"), rank),
        lambda rank: dist.barrier() if rank else dist.all_reduce(torch.ones(1, device="npu")),
    ],
)
def test_ranks_that_do_different_things(call):
    with pytest.raises(
        CollectiveMismatchError, match=r"^rank 1 calls .* on group '0' of ranks \[0, 1\], collective 1 wh"
    ):
        run(2, call)


def test_a_rank_that_does_not_come():
    with pytest.raises(
        RankMissingError, match=r"^rank 0 waits in barrier on group '0' of ranks \[0, 1\], collective 1"
    ):
        run(2, lambda rank: dist.barrier() if rank == 0 else None)


# ---- memory


def hccl_bytes(world: SimWorld) -> list[int]:
    return [card.ledger.bytes_by_owner().get(Owner.HCCL, 0) for card in world.cards]


def test_buffers_are_taken_at_the_first_collective_and_given_back_at_the_end():
    store = dist.HashStore()
    world = SimWorld(num_devices=2, environment={"HCCL_BUFFSIZE": "100"})
    first, further = world.profile.hccl_runtime_bytes.value, world.profile.communicator_control_bytes.value
    seen = []

    def rank(number):
        torch.npu.set_device(number)
        dist.init_process_group("hccl", rank=number, world_size=2, store=store)
        group = dist.new_group([0, 1])
        seen.append(hccl_bytes(world)[number])
        group.get_hccl_comm_name(number)
        seen.append(hccl_bytes(world)[number])
        dist.all_reduce(torch.ones(1, device="npu"))
        seen.append(hccl_bytes(world)[number])
        dist.all_reduce(torch.ones(1, device="npu"), group=group)
        seen.append(hccl_bytes(world)[number])
        dist.destroy_process_group()

    with world:
        world.run_ranks([lambda: rank(0), lambda: rank(1)])
    assert sorted(seen) == sorted([0, 0, 202 * MIB + first, 404 * MIB + first + further] * 2)
    assert hccl_bytes(world) == [first, first]


def test_a_group_can_have_a_buffer_size_of_its_own():
    def body(rank):
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": 50, "group_name": "dp"}
        group = dist.new_group([0, 1], pg_options=options)
        free = torch.npu.mem_get_info()[0]
        tensor = torch.ones(1, device="npu")
        torch.npu.current_stream().synchronize()
        taken = free - torch.npu.mem_get_info()[0]
        dist.all_reduce(tensor, group=group)
        return free - taken - torch.npu.mem_get_info()[0] >= 102 * MIB, group.group_name

    assert run(2, body) == [(True, "1")] * 2


def test_one_rank_takes_no_buffers():
    def body(rank):
        free = torch.npu.mem_get_info()[0]
        tensor = torch.ones(1, device="npu")
        used = free - torch.npu.mem_get_info()[0]
        dist.all_reduce(tensor)
        return free - torch.npu.mem_get_info()[0] - used

    assert run(1, body) == [0]


def test_a_device_without_room_for_the_buffers():
    def body(rank):
        dist.all_reduce(torch.ones(1, device="npu"))

    message = "HCCL function error: allreduce, error code is 3\n[ERROR] ERR02200 DIST call hccl api failed"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        run(2, body, environment={"HCCL_BUFFSIZE": "40000"})


def test_all_gather_into_a_list_takes_a_flat_tensor_and_pads_odd_sizes():
    def body(rank):
        peaks = []
        for count in (1024, 1000):
            part = torch.empty(count, device="npu")
            listed = [torch.empty(count, device="npu") for _ in range(2)]
            torch.npu.reset_peak_memory_stats()
            before = torch.npu.memory_allocated()
            dist.all_gather(listed, part)
            peaks.append(torch.npu.max_memory_allocated() - before)
            assert torch.npu.memory_allocated() == before
        return peaks

    # exact: torch_npu 2.13.0 pads to 512 bytes, two outputs and the input
    assert run(2, body) == [[8192 + 512, 3 * (4096 + 512) + 8192 + 512]] * 2


def test_each_communicator_has_a_stream():
    def body(rank):
        before = torch.npu.Stream().stream_id
        dist.all_reduce(torch.ones(1, device="npu"))
        return torch.npu.Stream().stream_id - before

    assert run(2, body) == [2, 2]


def test_a_lone_rank_does_not_know_what_another_broadcasts_from_its_host():
    """A broadcast of objects begins with their sizes, which the receiver would read from memory that nobody wrote."""
    with SimWorld(num_devices=2, lone_rank=1, environment={}):
        dist.init_process_group("hccl", rank=1, world_size=2, store=dist.HashStore())
        host = dist.new_group(backend="gloo")
        try:
            dist.broadcast_object_list(["mine"], src=1, group=host)
            with pytest.raises(
                UnmodelledCallError, match=r"only rank 1 of group .*: what rank 0 broadcasts from its host"
            ):
                dist.broadcast_object_list([None], src=0, group=host)
        finally:
            dist.destroy_process_group()

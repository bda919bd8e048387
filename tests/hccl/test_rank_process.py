"""Ranks in processes of their own: collectives exchange values, and each process accounts for its own device."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from npusim.errors import RankMissingError, WorldError
from npusim.hccl.rank_process import RankProcess
from npusim.hccl.ranks import Arrival
from npusim.ops.parts import update
from npusim.world import SimWorld

pytestmark = [pytest.mark.slow, pytest.mark.sim_only("about simulated ranks")]

NUM_RANKS = 2
PROGRAM = """
import json, sys
from npusim import SimWorld
rank, path = int(sys.argv[1]), sys.argv[2]
import torch
from torch import distributed as dist
from torch.distributed import FileStore

settings = dict(num_devices=2, environment={"HCCL_BUFFSIZE": "10"}, lone_rank=rank, store=FileStore(path, 2))
with SimWorld("a3-64g", values="real", **settings) as world:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", rank=rank, world_size=2, store=FileStore(path + ".torch", 2))
    mine = torch.arange(4.0, device="npu") + 10 * rank
    total = mine.clone()
    dist.all_reduce(total)
    every = torch.empty(8, device="npu")
    dist.all_gather_into_tensor(every, mine)
    share = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(share, mine)
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    swapped = torch.empty(4, device="npu")
    dist.all_to_all_single(swapped, mine)
    lengths = torch.tensor([rank + 1])
    host = dist.new_group(backend="gloo")
    dist.all_reduce(lengths, group=host)
    dist.barrier()
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    experts = torch.tensor([[3], [0 + rank], [2]], dtype=torch.int32, device="npu")
    shared = dict(group_ep=name, ep_world_size=2, ep_rank_id=rank, moe_expert_num=4, global_bs=6)
    x = torch.arange(1.0, 25).view(3, 8).bfloat16().to("npu") + 30 * rank
    arrived, _, assist, counts, received, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, experts, **shared)
    returned = torch.ops.npu.npu_moe_distribute_combine_v2(
        arrived * (2 + rank), experts, assist, received, torch.ones(3, 1, device="npu"), **shared
    )
    arrivals, returned = counts, (returned / x).mean(1)
    failure = None
    try:
        dist.all_reduce(mine) if rank else dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    tensors = dict(total=total, every=every, share=share, sent=sent, swapped=swapped, lengths=lengths,
                   arrivals=arrivals, returned=returned)
    print(json.dumps({
        "values": {name: tensor.tolist() for name, tensor in tensors.items()},
        "buffers": [sum(row.num_bytes for row in card.ledger.entries() if row.owner.value == "HCCL communicator")
                    for card in world.cards],
        "failure": failure,
    }))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes has afterwards."""
    path = str(tmp_path_factory.mktemp("store") / "store")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    runs = [
        subprocess.Popen([*command, str(rank), path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(NUM_RANKS)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [stderr[-1500:] for _, stderr in outputs]
    return [json.loads(stdout) for stdout, _ in outputs]


def test_values(results):
    zero, one = [0.0, 1, 2, 3], [10.0, 11, 12, 13]
    total = [a + b for a, b in zip(zero, one, strict=True)]
    for rank, result in enumerate(results):
        assert result["values"] == {
            "total": total,
            "every": zero + one,
            "share": total[2 * rank : 2 * rank + 2],
            "sent": one,
            "swapped": zero[2 * rank : 2 * rank + 2] + one[2 * rank : 2 * rank + 2],
            "lengths": [3],
            "arrivals": [[1, 1], [2, 2]][rank],  # of each of its experts
            "returned": [3.0, 2.0, 3.0],  # the second rank's experts triple
        }


def test_each_process_accounts_for_its_own_device(results):
    for rank, result in enumerate(results):
        assert result["buffers"][rank] > 2 * 10 << 20
        assert result["buffers"][1 - rank] == 0


def test_ranks_that_do_different_things(results):
    for result in results:
        assert result["failure"].startswith("CollectiveMismatchError: ")


def test_a_rank_that_never_arrives_is_named():
    from torch.distributed import HashStore

    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(RankMissingError, match=r"rank 1 waits in all_reduce on group 'tp' for group rank 0, which"):
        RankProcess(1, store).meet(("group 'tp'",), 1, 2, "all_reduce", Arrival(0), lambda *_: None)


def test_what_follows_from_values_of_another_process_holds_no_device_memory():
    with SimWorld(environment={}):
        tensor = torch.arange(1 << 16).to("npu")
        update([tensor], [tensor, torch.ones(1 << 16)], torch.add)
        del tensor  # its values have not been computed
        assert torch.npu.memory_allocated() == 0


def test_store_without_a_rank_is_refused():
    from torch.distributed import HashStore

    with pytest.raises(WorldError, match="a store needs lone_rank"):
        SimWorld(store=HashStore())

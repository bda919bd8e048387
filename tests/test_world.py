"""Worlds: one at a time, nothing left behind, the same every time."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.distributed as dist

from npusim import SimWorld, install, uninstall
from npusim.device.ledger import Owner
from npusim.errors import ProfileError, WorldError

pytestmark = pytest.mark.sim_only("worlds")


def world(**settings) -> SimWorld:
    return SimWorld(**({"environment": {}} | settings))


# ---- being active


def test_without_a_world():
    message = "no world is active: call npusim.install(SimWorld(...)) first, or use the world as a context"
    with world():
        tensor = torch.ones(2, device="npu")
    for use in (
        lambda: torch.empty(1, device="npu"),
        lambda: torch.npu.memory_allocated(),
        lambda: tensor + 1,
        lambda: tensor.cpu(),
    ):
        with pytest.raises(WorldError, match=re.escape(message)):
            use()
    assert not torch.npu.is_available()
    assert torch.npu.device_count() == 0
    assert "of a world that is not active" in repr(tensor)


def test_a_second_world_is_refused():
    with world():
        with pytest.raises(WorldError, match=r"^another world is active; deactivate it first"), world():
            pass
        assert torch.npu.is_available()
        torch.empty(1, device="npu")
    with world():
        pass


def test_install_and_uninstall():
    made = world()
    assert install(made) is made
    try:
        assert install(made) is made
        uninstall(world())
        assert torch.npu.is_available()
    finally:
        uninstall(made)
    assert not torch.npu.is_available()
    uninstall(made)


def test_an_error_inside_ends_the_world():
    with pytest.raises(ZeroDivisionError), world():
        assert 1 // 0
    assert not torch.npu.is_available()


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profile": "a3-64"}, "unknown device profile 'a3-64'; there are "),
        ({"num_devices": 0}, "num_devices must be a whole number of at least 1, got 0"),
        ({"num_devices": "2"}, "num_devices must be a whole number of at least 1, got '2'"),
        ({"profile": 3}, "profile must be a profile or its name, got 3"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": "x"}, "seed must be a whole number of at least 0, got 'x'"),
        ({"lone_rank": 1.0}, "lone_rank must be a whole number of at least 0, got 1.0"),
        ({"host_costs": 3}, "host_costs must be npusim.device.cost.HostCosts, got 3"),
        ({"total_bytes": "60 GiB"}, "total_bytes must be a whole number of at least 0, got '60 GiB'"),
        ({"free_bytes": -1}, "free_bytes must be a whole number of at least 0, got -1"),
        ({"other_processes": {"a": "1 GiB"}}, "other_processes['a'] must be a whole number of at least 0, got '1 GiB'"),
        ({"other_processes": 5}, "other_processes must be bytes by name, got 5"),
        ({"environment": 3}, "environment must be variables by name, got 3"),
        ({"environment": {"HCCL_BUFFSIZE": 200}}, "the variable 'HCCL_BUFFSIZE' must be a text, got 200"),
        ({"values": "rael"}, "values must be one of shape, real, got 'rael'"),
        ({"torch_npu_version": "1.11"}, "torch_npu_version must be one of "),
        ({"xlite_version": "9"}, "xlite_version must be one of 0.1.0rc11, "),
        (
            {"num_devices": 2, "free_bytes": [1]},
            "free_bytes has 1 entries for 2 devices; give one for all or one per device",
        ),
        (
            {"total_bytes": 1 << 30, "free_bytes": 2 << 30},
            "device 0: 2147483648 free bytes and 0 bytes of other processes",
        ),
        ({"environment": {"TASK_QUEUE_ENABLE": "3"}}, "TASK_QUEUE_ENABLE should be 0, 1 or 2, got '3'"),
        (
            {"environment": {"HCCL_BUFFSIZE": "x"}},
            "HCCL_BUFFSIZE must be an integer of at least 1 (megabytes), got",
        ),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises((WorldError, ProfileError), match=f"^{re.escape(message)}"):
        world(**settings)


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({}, 1),
        ({"TASK_QUEUE_ENABLE": "2"}, 2),
        ({"TASK_QUEUE_ENABLE": "0"}, 0),
        ({"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"}, 0),
    ],
)
def test_task_queue_level(environment, level):
    assert world(environment=environment).runtimes[0].task_queue_level == level


def test_settings_for_each_device():
    made = world(num_devices=2, free_bytes=[1 << 30, None], other_processes=[{"a": 1 << 20}, {}])
    with made:
        assert torch.npu.mem_get_info(0)[0] == 1 << 30
        assert torch.npu.mem_get_info(1)[0] > 50 << 30
    assert [card.ledger.bytes_by_owner().get(Owner.OTHER_PROCESS, 0) for card in made.cards] == [1 << 20, 0]


def test_the_environment_is_this_process_own_by_default(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "77")
    assert SimWorld().runtimes[0].hccl.settings.buffer_mb == 77
    assert world().runtimes[0].hccl.settings.buffer_mb == 200


def test_devices_that_do_not_exist():
    with pytest.raises(WorldError, match=r"^device npu:2 does not exist; this world has 2 device\(s\)$"):
        world(num_devices=2).set_device(2)


# ---- leaving nothing behind


def test_worlds_after_each_other_leak_nothing():
    digests, references = [], []
    for _ in range(2):
        made = world(num_devices=2)
        with made:
            assert (torch.npu.memory_allocated(), torch.npu.current_device(), torch.npu.current_stream().stream_id) == (
                0,
                0,
                0,
            )
            assert not dist.is_initialized()
            held = torch.randn(1000, device="npu")
            torch.npu.set_device(1)
            torch.npu.set_stream(torch.npu.Stream())
            torch.npu.manual_seed(7)
            store = dist.HashStore()
            dist.init_process_group("hccl", rank=0, world_size=1, store=store)
            digests.append((made.event_log.digest, held.tolist()))
            references += [weakref.ref(made), weakref.ref(made.storages), weakref.ref(made.runtimes[0])]
        del made, held
    assert digests[0] == digests[1]
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


def test_tensors_that_outlive_their_world():
    first, second = world(), world()
    with first:
        old = torch.ones(1000, device="npu")
    with second:
        new = torch.ones(1000, device="npu")
        for use in (lambda x: x + new, lambda x: x.cpu(), new.copy_):
            with pytest.raises(
                WorldError, match="a storage on npu:0 was not allocated by a device of the active world"
            ):
                use(old)
        assert "of a world that is not active" in repr(old)
        before = torch.npu.memory_allocated()
        del old  # goes back to its own world
        assert torch.npu.memory_allocated() == before
    assert first.runtimes[0].allocator.memory_allocated == 0
    assert len(first.storages) == 0


def test_tensors_that_outlive_a_world_that_is_gone():
    made = world()
    with made:
        old = [torch.ones(10, device="npu") for _ in range(3)]
    del made
    gc.collect()
    with world():
        torch.ones(10, device="npu")
    del old
    gc.collect()


# ---- the same every time

PROGRAM = textwrap.dedent(
    """
    import npusim, torch, torch.distributed as dist
    world = npusim.SimWorld(num_devices=2, environment={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
    with world:
        store, results = dist.HashStore(), []
        def rank(number):
            torch.npu.set_device(number)
            dist.init_process_group("hccl", rank=number, world_size=2, store=store)
            weights = {name: torch.randn(64, 64, device="npu") for name in ("q", "k", "v")}
            total = torch.zeros(64, device="npu")
            for name in set(weights):
                total += weights[name][0]
            for size in (1000, 5_000_000, 30_000_000):
                held = torch.empty(size, dtype=torch.uint8, device="npu")
                held.record_stream(torch.npu.Stream())
            dist.all_reduce(total)
            with torch.npu.graph(torch.npu.NPUGraph()):
                torch.empty(100, device="npu")
            return torch.npu.memory_allocated(), sorted(torch.npu.memory_stats().items())
        results = world.run_ranks([lambda: rank(0), lambda: rank(1)])
    print(world.event_log.digest, world.event_log.num_events, results)
    """
)
LEFTOVERS = textwrap.dedent(
    """
    import sys
    npusim.install(npusim.SimWorld(environment={}))
    module = torch.nn.Linear(10, 10, device="npu")
    sys.kept = torch.ones(10, device="npu", dtype=torch.bfloat16), torch.npu.Stream(), torch.npu.MemPool()
    cycle = [torch.ones(10, device="npu")]
    cycle.append(cycle)
    dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore())
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.ones(3, device="npu")
    """
)


@pytest.fixture(scope="module")
def output_elsewhere() -> str:
    """What the program prints in a fresh process with another hash seed, which ends with everything still alive."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + LEFTOVERS],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_same_program_does_the_same_in_every_process(output_elsewhere, capsys):
    for _ in range(2):
        exec(compile(PROGRAM, "program", "exec"), {})
        assert capsys.readouterr().out == output_elsewhere
    assert re.match(r"[0-9a-f]{64} [0-9]+ ", output_elsewhere)


def test_a_process_ends_quietly_with_tensors_worlds_and_groups_alive(output_elsewhere):
    assert output_elsewhere.endswith("\n")


def test_events_can_be_kept():
    made = world(keep_events=True)
    with made:
        torch.empty(1, device="npu")
    assert made.event_log.events[-1][0] == "hbm.malloc"
    assert len(made.event_log.events) == made.event_log.num_events

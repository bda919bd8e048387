"""What an HCCL communicator takes from the device, to the byte."""

from __future__ import annotations

import re

import pytest

from npusim.device.card import Card
from npusim.device.clock import Clock
from npusim.device.event_log import EventLog
from npusim.device.hbm import OutOfHbmError
from npusim.device.ledger import Owner
from npusim.device.profile import load_profile
from npusim.errors import WorldError
from npusim.hccl.communicator import HcclRuntime, HcclSettings

MIB = 1 << 20
PROFILE = load_profile("a3-64g")
FIRST = PROFILE.hccl_runtime_bytes.value
FURTHER = PROFILE.communicator_control_bytes.value


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // (2 * MIB)) * 2 * MIB


def runtime(settings: HcclSettings | None = None, **card) -> HcclRuntime:
    return HcclRuntime(Card(0, PROFILE, Clock(), EventLog(), **card), settings or HcclSettings())


def taken(hccl: HcclRuntime) -> int:
    return hccl.card.ledger.bytes_by_owner().get(Owner.HCCL, 0)


def test_creation_takes_nothing():
    hccl = runtime()
    hccl.communicator("tp", 2)
    assert taken(hccl) == 0


@pytest.mark.parametrize("buffer_mb", [1, 50, 200, 1024])
def test_the_first_operation_takes_two_buffers_and_a_window(buffer_mb):
    hccl = runtime()
    communicator = hccl.communicator("tp", 2, buffer_mb)
    communicator.operate()
    assert taken(hccl) == whole_pages((2 * buffer_mb + 1) * MIB) + FIRST
    communicator.operate()
    assert taken(hccl) == whole_pages((2 * buffer_mb + 1) * MIB) + FIRST
    (allocation,) = [entry for entry in hccl.card.ledger.entries() if "buffers" in entry.label]
    assert allocation.label == "tp: in and out buffers, window"
    assert allocation.grade.value == "exact"


def test_the_environment_decides_the_size_unless_the_group_does():
    hccl = runtime(HcclSettings(buffer_mb=1024))
    assert hccl.communicator("a", 2).buffer_mb == 1024
    assert hccl.communicator("a", 2, 50).buffer_mb == 50


def test_a_group_of_one_rank_takes_nothing():
    hccl = runtime()
    hccl.communicator("pp", 1).operate()
    assert taken(hccl) == 0


def test_further_communicators_take_control_memory_instead_of_the_runtimes():
    hccl = runtime()
    for name in ("tp", "ep", "dp"):
        hccl.communicator(name, 2).operate()
    assert taken(hccl) == 3 * 402 * MIB + FIRST + 2 * FURTHER
    labels = [entry.label for entry in hccl.card.ledger.entries() if entry.owner is Owner.HCCL]
    assert labels == [
        "tp: in and out buffers, window",
        "runtime, first communicator",
        "ep: in and out buffers, window",
        "ep: control memory",
        "dp: in and out buffers, window",
        "dp: control memory",
    ]


def test_aiv_takes_buffers_of_its_own():
    hccl = runtime(HcclSettings(uses_aiv=True))
    hccl.communicator("tp", 2).operate()
    assert taken(hccl) == 402 * MIB + whole_pages((36 + 4) * MIB + (32 << 10)) + FIRST


def test_mc2_takes_a_workspace_besides():
    hccl = runtime()
    communicator = hccl.communicator("mc2", 2)
    for _ in range(2):
        communicator.operate_mc2()
        assert taken(hccl) == 402 * MIB + FIRST + PROFILE.mc2_workspace_bytes.value


def test_destroy_gives_back_all_but_what_the_process_keeps():
    hccl = runtime(HcclSettings(uses_aiv=True))
    first, second = hccl.communicator("tp", 2), hccl.communicator("ep", 2)
    first.operate()
    second.operate_mc2()
    second.destroy()
    first.destroy()
    assert taken(hccl) == FIRST
    first.operate()
    assert taken(hccl) > 400 * MIB


def test_a_full_device_is_left_as_it_was():
    hccl = runtime(HcclSettings(uses_aiv=True), total_bytes=2 << 30, free_bytes=403 * MIB)
    communicator = hccl.communicator("tp", 2)
    for _ in range(2):
        with pytest.raises(OutOfHbmError):
            communicator.operate()
        assert taken(hccl) == 0
    communicator = hccl.communicator("tp", 2, 100)
    communicator.operate()
    assert taken(hccl) == 202 * MIB + 42 * MIB + FIRST


# ---- settings from the environment


def settings(environment: dict[str, str]) -> HcclSettings:
    from npusim.world import SimWorld

    return SimWorld(environment=environment).runtimes[0].hccl.settings


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, HcclSettings(200, uses_aiv=False)),
        ({"HCCL_BUFFSIZE": "1024"}, HcclSettings(1024)),
        ({"HCCL_BUFFSIZE": "1"}, HcclSettings(1)),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, HcclSettings(200, uses_aiv=True)),
        ({"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, HcclSettings(200)),
        ({"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": "true"}, HcclSettings(200)),
        ({"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": "false"}, HcclSettings(200, uses_aiv=True)),
    ],
)
def test_environment(environment, expected):
    assert settings(environment) == expected


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "200MB", "two"])
def test_buffer_sizes_that_hccl_refuses(text):
    message = f"HCCL_BUFFSIZE must be an integer of at least 1 (megabytes), got {text!r}"
    with pytest.raises(WorldError, match=f"^{re.escape(message)}$"):
        settings({"HCCL_BUFFSIZE": text})

"""Mixture-of-experts communication: which way is chosen, and what it does to the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.forward_context import (
    AscendDeviceType,
    MoECommType,
    mc2_tokens_capacity,
    select_moe_comm_method,
)

MODELS = Path(__file__).parents[2] / "examples" / "models"
MOE = ModelConfig.from_hf(json.loads((MODELS / "Qwen3-30B-A3B.json").read_text()))
DENSE = ModelConfig.from_hf(json.loads((MODELS / "Qwen3-32B.json").read_text()))
A2, A3, A5, P310 = AscendDeviceType.A2, AscendDeviceType.A3, AscendDeviceType.A5, AscendDeviceType._310P
ALLGATHER, ALLTOALL, MC2 = MoECommType.ALLGATHER, MoECommType.ALLTOALL, MoECommType.MC2


def config(model=MOE, **settings):
    defaults = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "enforce_eager": True}
    return check_and_update_config(EngineArgs.model_validate(defaults | settings), model)


EP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
EP16 = {"tensor_parallel_size": 4, "data_parallel_size": 4, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("settings", "device", "num_tokens", "expected"),
    [
        ({"tensor_parallel_size": 2}, A3, 8192, ALLGATHER),  # experts not spread
        ({"enable_expert_parallel": True}, A3, 8192, ALLGATHER),  # over one rank
        (EP2, A2, 64, ALLGATHER),
        (EP2, A2, 8192, ALLGATHER),
        (EP16, A2, 64, MC2),  # 8 experts a device, 16 devices
        (EP16, A2, 65, ALLGATHER),
        (EP2, A3, 64, MC2),
        (EP2, A3, 65, ALLTOALL),
        (EP2, A3, 8192, ALLTOALL),
        (EP2, A5, 64, MC2),
        (EP2, A5, 65, ALLGATHER),  # 2 devices, 8 experts a token
        (EP16, A5, 65, ALLTOALL),
        (EP2, P310, 64, ALLGATHER),
    ],
)
def test_way_of_communication(settings, device, num_tokens, expected):
    assert select_moe_comm_method(num_tokens, config(**settings), device) is expected


def test_a_dense_model_has_no_way_of_communication():
    assert select_moe_comm_method(8192, config(DENSE), A3) is None


@pytest.mark.parametrize(
    ("settings", "capacity"),
    [
        ({"max_num_seqs": 64, **EP2}, 64),
        ({"max_num_seqs": 63, **EP2}, 64),  # whole tokens on each rank
        ({"max_num_seqs": 4096, **EP2}, 1024),  # at most 512 a rank
        ({"max_num_seqs": 64, "enforce_eager": False, **EP2}, 64),  # the largest captured step
    ],
)
def test_capacity_of_the_mc2_operators(settings, capacity):
    assert mc2_tokens_capacity(config(**settings)) == capacity


@pytest.mark.parametrize(("soc_version", "expected"), [(223, A2), (250, A3), (202, P310), (260, A5)])
def test_device_type(soc_version, expected):
    assert AscendDeviceType.of(soc_version) is expected


def test_unknown_device_type():
    with pytest.raises(RuntimeError, match=r"Can not support soc_version: 104\."):
        AscendDeviceType.of(104)

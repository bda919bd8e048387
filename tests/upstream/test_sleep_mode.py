"""vllm-ascend's own allocator of sleep mode, unmodified, on the double of its compiled extension."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.upstream.cases import RELEASES, ROOT

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

PROGRAM = """
import json, torch, npusim
with npusim.SimWorld(profile="a3-64g", environment={}) as world:
    from vllm_ascend.device_allocator.camem import CaMemAllocator
    allocator = CaMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        weight = torch.tensor([5, 6, 7]).to("npu")
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.empty(1 << 30, dtype=torch.uint8, device="npu")
    free = [torch.npu.mem_get_info()[0]]
    allocator.sleep(offload_tags=("weights",))
    free.append(torch.npu.mem_get_info()[0])
    for tag in ("weights", "kv_cache"):
        allocator.wake_up(tags=[tag])
        free.append(torch.npu.mem_get_info()[0])
    print(json.dumps([allocator.get_current_usage(), free, weight.tolist()]))
"""


@pytest.mark.parametrize("release", RELEASES)
def test_sleep_frees_everything_and_wake_up_brings_it_back(upstream_environment, release):
    paths = (ROOT, Path(__file__).parent / "path", upstream_environment / release)
    run = subprocess.run(
        [upstream_environment / "venv" / "bin" / "python", "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=True,
    )
    usage, (awake, asleep, weights_awake, all_awake), values = json.loads(run.stdout.splitlines()[-1])
    assert asleep - awake == usage == (1 << 30) + (4 << 20)
    assert asleep - weights_awake == 2 << 20
    assert all_awake == awake
    assert values == [5, 6, 7]

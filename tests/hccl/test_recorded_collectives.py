"""Collectives against what the real torch_npu did with them: memory step by step, results, refusals.

Data: ``tests/data/operators/collective_{1,2}.jsonl.gz``, see there.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from npusim import SimWorld

pytestmark = pytest.mark.sim_only("replays records of one process in ranks of a world")
DATA = Path(__file__).parents[1] / "data" / "operators"
FRACTAL_NZ = 29
Record = dict[str, Any]


def records(num_ranks: int) -> list[Record]:
    with gzip.open(DATA / f"collective_{num_ranks}.jsonl.gz", "rt", encoding="utf-8") as file:
        _, *lines = (json.loads(line) for line in file)
    return [
        line
        for line in lines
        if "variant" not in line
        and all(tensor.get("f") != FRACTAL_NZ for tensor in tensors_of(line))
        and line.get("tag")
        != "uneven"  # sends itself other rows than it expects, which only the stand-in HCCL lets pass
    ]


def tensors_of(record: Record) -> list[Record]:
    flat = [item for arg in record["args"] for item in (arg if isinstance(arg, list) else [arg])]
    return [item for item in flat if isinstance(item, dict)]


def make(description: Any) -> Any:
    if isinstance(description, list):
        return [make(item) for item in description]
    if not isinstance(description, dict):
        return description
    dtype = getattr(torch, description["d"])
    device = description.get("dev", "npu")
    base = torch.empty(description["b"] // dtype.itemsize, dtype=dtype, device=device)
    size = description["t"]
    return base.view(size) if "s" not in description else base.as_strided(size, description["s"])


def logits_gather(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    gathered = torch.empty((num_ranks * tensor.shape[0], tensor.shape[1]), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_single(gathered, tensor)
    return gathered.view(num_ranks, *tensor.shape).movedim(0, 1).reshape(tensor.shape[0], -1)


def call(record: Record, args: list[Any]) -> Any:
    name = record["op"].removeprefix("py::")
    if name == "logits_gather":
        return logits_gather(*args)
    if name.startswith("functional_"):
        result = getattr(torch.ops._c10d_functional, name.removeprefix("functional_"))(*args)
        return torch.ops._c10d_functional.wait_tensor(result)
    name = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}.get(
        name, name
    )
    return getattr(dist, name)(*args, **record["kw"])


def replay(record: Record) -> Record:
    """What the record's call did here, in the record's form."""
    torch.npu.empty_cache()
    args = make(record["args"])
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()

    def memory() -> tuple[int, int]:
        stats = torch.npu.memory_stats()
        return stats["allocated_bytes.all.current"], stats["requested_bytes.all.current"]

    before = memory()
    done: Record = {}
    result = None
    try:
        result = call(record, args)
    except RuntimeError as error:
        done["error"] = f"RuntimeError: {error}"
    stats = torch.npu.memory_stats()
    peak = stats["allocated_bytes.all.peak"], stats["requested_bytes.all.peak"]
    after = memory()
    done["out"] = None if result is None else {"t": list(result.shape), "d": str(result.dtype).removeprefix("torch.")}
    del result
    dropped = memory()
    steps = list(zip(before, peak, after, dropped, strict=True))
    done["mem"] = {"allocated": list(steps[0]), "requested": list(steps[1])}
    return done


def differences(record: Record, done: Record) -> list[str]:
    expected_out = record.get("out")
    if expected_out is not None:
        expected_out = {"t": expected_out["t"], "d": expected_out["d"]}
    found = []
    for key, expected in (("error", record.get("error")), ("out", expected_out), ("mem", record["mem"])):
        if done.get(key) != expected:
            found.append(
                f"{record['n']} {record['op']} {record.get('tag', '')}: {key} {done.get(key)}, recorded {expected}"
            )
    return found


@pytest.mark.filterwarnings("ignore:.*using the device under current context:UserWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_collectives_do_what_torch_npu_does(num_ranks):
    cases = records(num_ranks)
    assert len(cases) > 130
    store = dist.HashStore()
    # the records have no HCCL buffers; here they only have to fit
    world = SimWorld("a3-64g", num_devices=num_ranks, environment={})

    def rank(number: int) -> list[str]:
        torch.npu.set_device(number)
        dist.init_process_group("hccl", rank=number, world_size=num_ranks, store=store)
        found = []
        with torch.inference_mode():
            for record in cases:
                found += differences(record, replay(record))
        return found

    with world:
        results = world.run_ranks([lambda number=number: rank(number) for number in range(num_ranks)])
    assert results[0] == []


def test_error_codes_are_in_the_records():
    errors = {record["error"] for record in records(2) if "error" in record}
    assert {re.findall(r"ERR\d+ DIST [a-z ]+", error)[0] for error in errors if "ERR" in error} == {
        "ERR02001 DIST invalid parameter",
        "ERR02002 DIST invalid type",
        "ERR02007 DIST feature not supported",
    }

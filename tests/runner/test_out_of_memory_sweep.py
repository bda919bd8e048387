"""Whichever device allocation of a start-up fails: a typed error or none, books that balance, a world that goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from npusim.device.ledger import Owner
from npusim.memory.blocks import ALLOCATED
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario
from xlite_runner.simulation import build_world

pytestmark = pytest.mark.sim_only("faults of the device")

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 1500}  # two pages of 20 MiB
START_UPS = {
    "runnable": (ProfilePolicy.RUNNABLE, FEW_BLOCKS),
    "skip": (ProfilePolicy.SKIP, FEW_BLOCKS),
    "fixed segments": (
        ProfilePolicy.RUNNABLE,
        FEW_BLOCKS | {"environment": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}},
    ),
    "two ranks": (ProfilePolicy.SKIP, FEW_BLOCKS | {"tensor_parallel_size": 2}),
}
SUCCESS = ("", "")
OUT_OF_MEMORY = {
    "allocator": ("OutOfMemoryError", "NPU out of memory."),
    "xlite": ("RuntimeError", "XRuntime: tensor pool initialization"),
    "hccl": ("RuntimeError", "HCCL function error: allgather_base,"),
}
"""Class and first words of the vendor's errors, by who asked the device."""


@pytest.fixture(scope="module", autouse=True)
def _imports_out_of_the_collectors_way() -> Iterator[None]:
    """A start-up collects garbage at a dozen points; see :func:`xlite_runner.simulation.start`."""
    import xlite_runner.engine  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class StartUp:
    """One start-up, in a world of its own."""

    def __init__(self, name: str) -> None:
        self.policy, overrides = START_UPS[name]
        scenario = load_scenario(TINY, overrides)
        self.config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
        self.world = build_world(scenario, self.config, self.policy)

    def run(self) -> Any:
        """The engine, started; call it inside the world."""
        from xlite_runner.engine import EngineCore

        engine = EngineCore(self.config, self.policy, self.world.run_ranks, HashStore())
        engine.start()
        return engine

    def outcome(self) -> tuple[str, str]:
        """Class and first words of the error that ends the start-up, if any; the error itself keeps tensors alive."""
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - the test says which are allowed
            return type(error).__name__, " ".join(str(error).split()[:4])
        return "", ""


def check_books(world: Any) -> None:
    """Every ledger is the sum of its entries, and the allocators' statistics are a count of their blocks."""
    for card, runtime in zip(world.cards, world.runtimes, strict=True):
        ledger, allocator = card.ledger, runtime.allocator
        owners = ledger.bytes_by_owner()
        assert ledger.used_bytes == sum(entry.num_bytes for entry in ledger.entries()) == sum(owners.values())
        blocks = list(allocator.blocks())
        assert owners.get(Owner.TORCH_SEGMENT, 0) == allocator.memory_reserved == sum(block.size for block in blocks)
        assert allocator.memory_allocated == sum(block.size for block in blocks if block.state == ALLOCATED)


def check_usable(world: Any) -> None:
    """What torch holds can be freed, and nearly everything allocated again. xlite keeps its pool."""
    gc.collect()
    torch.npu.empty_cache()
    for device, (card, runtime) in enumerate(zip(world.cards, world.runtimes, strict=True)):
        assert runtime.allocator.memory_allocated == runtime.allocator.memory_reserved == 0
        assert Owner.TORCH_SEGMENT not in card.ledger.bytes_by_owner()
        free_bytes, _ = torch.npu.mem_get_info(device)
        tensor = torch.empty(free_bytes - (32 << 20), dtype=torch.uint8, device=f"npu:{device}")
        assert runtime.allocator.memory_allocated >= tensor.nbytes
    check_books(world)


def num_allocations(name: str) -> int:
    start_up = StartUp(name)
    with start_up.world as world:
        engine = start_up.run()
        check_books(world)
        del engine
        return int(world.cards[0].faults.num_allocations)


@pytest.mark.parametrize(
    ("name", "num_failures"), [("runnable", 1), ("runnable", 2), ("skip", 2), ("fixed segments", 2), ("two ranks", 1)]
)
def test_any_allocation_fails(name: str, num_failures: int) -> None:
    outcomes = []
    for ordinal in range(num_allocations(name)):
        start_up = StartUp(name)
        for number in range(num_failures):
            start_up.world.cards[0].faults.fail_next(ordinal + number)
        with start_up.world as world:
            outcomes.append(start_up.outcome())
            check_books(world)
            check_usable(world)
    assert set(outcomes) <= {SUCCESS, *OUT_OF_MEMORY.values()}
    # The allocator empties its cache and asks once more, so a single failure ends only what asks the device itself.
    assert (OUT_OF_MEMORY["allocator"] in outcomes) == (num_failures == 2)
    assert (SUCCESS in outcomes) == (num_failures == 1)
    assert OUT_OF_MEMORY["xlite"] in outcomes
    assert (OUT_OF_MEMORY["hccl"] in outcomes) == (name == "two ranks")

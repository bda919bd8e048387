"""Rank 0 of a start-up on the device under test, its peers being taken to do as it does.

On the simulated device that is a world's ``lone_rank``; on the stub CANN collectives return at once.
"""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlite_runner.config import ModelConfig, ProfilePolicy, RunnerConfig, check_and_update_config
from xlite_runner.result import ProfileResult, RankResult
from xlite_runner.scenario import load_scenario
from xlite_runner.simulation import build_world, captured_log


@dataclass(frozen=True)
class LoneRank:
    """A rank that is ready to serve, and what it reported."""

    config: RunnerConfig
    worker: Any
    result: ProfileResult

    @property
    def memory(self) -> RankResult:
        return self.result.ranks[0]


class LoneRanks:
    """Starts ranks one after the other; each ends when the next one starts, or with :meth:`end`."""

    def __init__(self, *, simulated: bool) -> None:
        self._simulated = simulated
        self._stack = ExitStack()

    def start(self, path: Path, policy: str, *, num_layers: int | None = None, **settings: Any) -> LoneRank:
        """Start rank 0 of a scenario, with fewer layers if need be."""
        self.end()
        scenario = load_scenario(path, settings)
        published = json.loads(Path(scenario.model).read_text())
        if num_layers is not None:
            published["num_hidden_layers"] = num_layers
        config = check_and_update_config(scenario, ModelConfig.from_hf(published))
        if self._simulated:
            self._stack.enter_context(build_world(scenario, config, ProfilePolicy(policy), lone_rank=0))
        import torch.distributed as dist

        from xlite_runner.engine import EngineCore

        self._stack.callback(_destroy_groups)
        engine = EngineCore(config, ProfilePolicy(policy), lambda ranks: [rank() for rank in ranks], dist.HashStore())
        del engine.workers[1:]
        with captured_log() as lines:
            engine.start()
        return LoneRank(config, engine.workers[0], engine.result(lines))

    def end(self) -> None:
        """End the one that was started last."""
        self._stack.callback(gc.collect)
        self._stack.close()
        if not self._simulated:
            import torch

            torch.npu.empty_cache()


def _destroy_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

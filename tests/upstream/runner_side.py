"""The runner's side of a comparison: the same start-ups and the same requests on the same world, by xlite_runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from npusim.told import ToldTokens
from npusim.world import SimWorld
from tests.upstream.cases import Case, ServingCase, has_the_fix
from xlite_runner.config import ModelConfig, ProfilePolicy, RunnerConfig, check_and_update_config
from xlite_runner.result import RankResult
from xlite_runner.scenario import Scenario, load_scenario
from xlite_runner.serving.core.request import Request
from xlite_runner.serving.engine_core import ReplicaStep, ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.serving.output import ModelRunnerOutput
from xlite_runner.serving.sampling_params import SamplingParams
from xlite_runner.simulation import build_world, ledgers, start


def policy_of(release: str) -> ProfilePolicy:
    """What a release's profile run executes in xlite full mode."""
    return ProfilePolicy.SKIP if has_the_fix(release) else ProfilePolicy.RUNNABLE


def configured(case: Case) -> tuple[Scenario, RunnerConfig]:
    """A case's scenario and the engine's configuration."""
    scenario = load_scenario(case.scenario, case.settings)
    return scenario, check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))


def figures_of_runner(case: Case, release: str) -> list[dict[str, int]]:
    """What a start-up measures, by rank."""
    scenario, config = configured(case)
    return [figures(rank) for rank in start(scenario, config, policy_of(release)).ranks]


def figures(rank: RankResult) -> dict[str, int]:
    """Those that are compared."""
    return {
        "weights": rank.weights_bytes,
        "peak_activation": rank.peak_activation_bytes,
        "non_torch": rank.non_torch_bytes,
        "available": rank.available_kv_cache_bytes,
        "kv_cache": rank.kv_cache_bytes,
        "graph": rank.graph_bytes,
    }


class MeasuringExecutor:
    """Runs steps on all workers, and measures each rank.

    Args:
        executor: Runs them.
        num_ranks: All of them.
        num_replicas: Replicas of the same number of ranks.
    """

    def __init__(self, executor: WorkerExecutor, num_ranks: int, num_replicas: int) -> None:
        self._executor = executor
        self._ranks_per_replica = num_ranks // num_replicas
        self.steps: list[list[dict[str, Any]]] = [[] for _ in range(num_ranks)]
        """By rank, all steps that did anything."""

    def execute_model(self, steps: Sequence[ReplicaStep]) -> Sequence[ModelRunnerOutput | None]:
        """Execute and measure."""
        from torch import npu

        devices = range(len(self.steps))
        for device in devices:
            npu.reset_peak_memory_stats(device)
        idle = [npu.memory_allocated(device) for device in devices]
        outputs = self._executor.execute_model(steps)
        for device in devices:
            step = steps[device // self._ranks_per_replica]
            plan = step.scheduler_output
            scheduled = dict(plan.num_scheduled_tokens) if plan is not None else {}
            if scheduled or step.dummy_batch:
                self.steps[device].append(
                    {
                        "num_scheduled_tokens": scheduled,
                        "peak": npu.max_memory_allocated(device) - idle[device],
                        "kept": npu.memory_allocated(device) - idle[device],
                        "reserved": npu.memory_reserved(device),
                    }
                )
        return outputs


def holdings(world: SimWorld, rank: int) -> dict[str, int]:
    """Bytes on a rank's device, by owner and label."""
    held: Counter[str] = Counter()
    for row in ledgers(world)[rank]:
        held[f"{row.owner}: {row.label}"] += row.num_bytes
    return dict(held)


def serve_by_runner(case: ServingCase, release: str) -> list[dict[str, Any]]:
    """Start, then serve the requests of a case to their end; by rank, in the form of upstream's results."""
    scenario, config = configured(case)
    told = ToldTokens(config.model.vocab_size)
    with build_world(scenario, config, policy_of(release), told_values=told) as world:
        from torch.distributed import HashStore

        from xlite_runner.engine import EngineCore

        engine = EngineCore(config, policy_of(release), world.run_ranks, HashStore())
        engine.start()
        world.run_ranks([worker.execute_dummy_batch for worker in engine.workers])
        num_ranks, num_replicas = config.parallel.num_ranks, config.parallel.num_replicas
        before = [holdings(world, rank) for rank in range(num_ranks)]
        available = [worker.memory.available_kv_cache for worker in engine.workers]
        by_workers = WorkerExecutor(engine.workers, num_replicas, world.run_ranks)
        executor = MeasuringExecutor(by_workers, num_ranks, num_replicas)
        serving = ServingEngine.from_config(config, engine.num_gpu_blocks, executor)
        for number, (prompt, sampling) in enumerate(case.requests):
            params = SamplingParams(ignore_eos=True, **sampling)
            serving.add_request(Request(str(number), list(prompt), params), case.replica_of(number))
        while serving.has_work:
            serving.step()
        return [
            {
                "start": figures(engine.result().ranks[rank]),
                "is_limiting": available[rank] == min(available),
                "steps": executor.steps[rank],
                "before": before[rank],
                "after": holdings(world, rank),
            }
            for rank in range(num_ranks)
        ]

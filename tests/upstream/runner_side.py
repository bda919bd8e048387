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


def figures_of_runner(case: Case, release: str) -> dict[str, int]:
    """What a start-up measures on the case's rank."""
    scenario, config = configured(case)
    return figures(start(scenario, config, policy_of(release)).ranks[case.rank])


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
    """Runs steps on all workers, and measures one rank.

    Args:
        executor: Runs them.
        rank: The rank to measure.
    """

    def __init__(self, executor: WorkerExecutor, rank: int) -> None:
        self._executor = executor
        self._rank = rank
        self.steps: list[dict[str, Any]] = []

    def execute_model(self, steps: Sequence[ReplicaStep]) -> Sequence[ModelRunnerOutput | None]:
        """Execute and measure."""
        from torch import npu

        device = self._rank
        npu.reset_peak_memory_stats(device)
        idle = npu.memory_allocated(device)
        outputs = self._executor.execute_model(steps)
        plan = steps[0].scheduler_output
        if plan is not None and plan.num_scheduled_tokens:
            self.steps.append(
                {
                    "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
                    "peak": npu.max_memory_allocated(device) - idle,
                    "kept": npu.memory_allocated(device) - idle,
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


def serve_by_runner(case: ServingCase, release: str) -> dict[str, Any]:
    """Start, then serve the requests of a case to their end; in the form of upstream's result."""
    scenario, config = configured(case)
    told = ToldTokens(config.model.vocab_size)
    with build_world(scenario, config, policy_of(release), told_values=told) as world:
        from torch.distributed import HashStore

        from xlite_runner.engine import EngineCore

        engine = EngineCore(config, policy_of(release), world.run_ranks, HashStore())
        engine.start()
        world.run_ranks([worker.execute_dummy_batch for worker in engine.workers])
        before = holdings(world, case.rank)
        available = [worker.memory.available_kv_cache for worker in engine.workers]
        executor = MeasuringExecutor(WorkerExecutor(engine.workers, 1, world.run_ranks), case.rank)
        serving = ServingEngine.from_config(config, engine.kv_cache_configs[0].num_blocks, executor)
        requests = [
            Request(str(i), list(prompt), SamplingParams(ignore_eos=True, **sampling))
            for i, (prompt, sampling) in enumerate(case.requests)
        ]
        for request in requests:
            serving.add_request(request)
        while serving.has_work:
            serving.step()
        return {
            "start": figures(engine.result().ranks[case.rank]),
            "is_limiting": available[case.rank] == min(available),
            "steps": executor.steps,
            "before": before,
            "after": holdings(world, case.rank),
        }

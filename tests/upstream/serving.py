"""Serves with upstream's own scheduler and worker on a simulated world: what each step takes, and who holds it.

Run as a script inside an environment that has vllm and vllm-ascend; prints a line of JSON::

    python -m tests.upstream.serving examples/tiny.toml --prompts 7 400 30
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from npusim.told import ToldTokens
from tests.upstream.cases import ServingCase, served
from tests.upstream.engine import (
    StartedRank,
    UpstreamResult,
    import_upstream,
    scenario_parser,
    started,
    stdout_for_results,
)
from tests.upstream.ranks import Rendezvous
from tests.upstream.reference import shortfalls
from tests.upstream.runner_side import holdings
from xlite_runner.scenario import Scenario, load_scenario


@dataclass
class Step:
    """One step of the engine; sizes in bytes.

    Attributes:
        num_scheduled_tokens: Tokens by request; none: a dummy batch, since another replica has requests.
        logits_peak: Most allocated up to the logits, above what was before the step.
        peak: Most allocated in the whole step, above what was before it.
        kept: What is allocated after the step and was not before it.
        reserved: What the caching allocator holds after the step.
        sampled: New tokens of each request.
    """

    num_scheduled_tokens: dict[str, int]
    logits_peak: int
    peak: int
    kept: int
    reserved: int
    sampled: list[list[int]]


@dataclass
class ServingResult:
    """What serving took on one rank.

    Attributes:
        start: The start-up's result.
        steps: All steps, in order.
        outputs: Tokens of each request, in the order of the prompts.
        before: Bytes by owner in the ledger after the start-up.
        after: The same when all requests are finished.
    """

    start: UpstreamResult
    steps: list[Step] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    shortfalls: list[list[float]] = field(default_factory=list)


class ToldSteps(ToldTokens):
    """Told tokens of steps in which rows may have drafts: what follows a row's last place is -1, as a kernel left it.

    Attributes:
        num_places: Of each row of the current step, one more than it has drafts; set by who serves.
    """

    num_places: Callable[[], Sequence[int]] = staticmethod(lambda: ())

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """See :class:`ToldTokens`."""
        told, num_places = super().__call__(tensor), self.num_places()
        if told is not None and not told.is_floating_point() and told.dim() == 2 and len(told) == len(num_places):
            for row, end in enumerate(num_places):
                told[row, end:] = -1
        return told


def serve_case(case: ServingCase, scenario: Scenario, rank: int = 0, peers: Rendezvous | None = None) -> ServingResult:
    """Start upstream, then serve the requests of a case to their end.

    Raises:
        Exception: What upstream raises.
    """
    engine_args = {"async_scheduling": False, "max_logprobs": -1, **case.engine_args}
    told = None if case.values == "real" else ToldSteps(json.loads(scenario.model.read_text())["vocab_size"])
    with started(scenario, rank, peers, values=case.values, told_values=told, engine_args=engine_args) as upstream:
        upstream.worker.execute_dummy_batch()
        result = ServingResult(upstream.result, before=holdings(upstream.world, rank))
        scheduler, requests = schedule(upstream, case)
        result.steps.extend(serve(upstream, scheduler, told))
        result.after = holdings(upstream.world, rank)
        result.outputs = [list(request.output_token_ids) for request in requests]
        if case.values == "real":
            result.shortfalls = shortfalls(Path(upstream.config.model_config.model), case.prompts, result.outputs)
        return result


def schedule(upstream: StartedRank, case: ServingCase) -> tuple[Any, list[Any]]:
    """Upstream's scheduler with those of a case's requests in it that the rank's replica serves, and these requests."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config, block_size = upstream.config, upstream.config.cache_config.block_size
    config.cache_config.num_gpu_blocks = upstream.plan.num_blocks
    init_none_hash(sha256)
    scheduler = Scheduler(config, upstream.plan, StructuredOutputManager(config), block_size)
    replica = config.parallel_config.data_parallel_index
    requests = [
        Request(
            str(i),
            list(prompt),
            SamplingParams(ignore_eos=True, detokenize=False, **_with_lists(sampling)),
            None,
            block_hasher=get_request_block_hasher(block_size, sha256),
        )
        for i, (prompt, sampling) in enumerate(case.requests)
        if case.replica_of(i) == replica
    ]
    for request in requests:
        scheduler.add_request(request)
    return scheduler, requests


def _with_lists(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()}


def serve(upstream: StartedRank, scheduler: Any, told: ToldSteps | None = None) -> Iterator[Step]:
    """Run steps until no request is left, here or on a replica that has collectives in common with this one."""
    in_lockstep = upstream.config.parallel_config.data_parallel_size > 1
    num_steps = 0
    while in_lockstep or scheduler.has_requests():
        step = run_step(upstream, scheduler, told, in_lockstep=in_lockstep)
        if step is not None:
            yield step
        num_steps += 1
        if in_lockstep and num_steps % STEPS_BETWEEN_AGREEMENTS == 0 and not any_has_requests(scheduler):
            break


STEPS_BETWEEN_AGREEMENTS = 32
"""As in upstream's ``DPEngineCoreProc``."""


def any_has_requests(scheduler: Any) -> bool:
    """Whether any data-parallel rank has requests left."""
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import get_dp_group

    return bool(ParallelConfig.has_unfinished_dp(get_dp_group().cpu_group, scheduler.has_unfinished_requests()))


def run_step(upstream: StartedRank, scheduler: Any, told: ToldSteps | None, *, in_lockstep: bool) -> Step | None:
    """Do what upstream's engine core does in one step; None if that is nothing."""
    import torch

    worker, npu = upstream.worker, torch.npu
    npu.reset_peak_memory_stats()
    idle, logits_peak = npu.memory_allocated(), 0
    plan = output = None
    if scheduler.has_requests():
        plan = scheduler.schedule()
        if told is not None:
            drafts, batch = plan.scheduled_spec_decode_tokens, worker.model_runner.input_batch
            told.num_places = lambda: [1 + len(drafts.get(req_id, ())) for req_id in batch.req_ids]
        output = worker.execute_model(plan)
        logits_peak = npu.max_memory_allocated()
        if output is None:
            output = worker.sample_tokens(None)
    has_executed = plan is not None and bool(plan.total_num_scheduled_tokens)
    if in_lockstep and not has_executed:
        worker.execute_dummy_batch()
    step = Step(
        num_scheduled_tokens=dict(plan.num_scheduled_tokens) if plan else {},
        logits_peak=logits_peak - idle,
        peak=npu.max_memory_allocated() - idle,
        kept=npu.memory_allocated() - idle,
        reserved=npu.memory_reserved(),
        sampled=[list(map(int, ids)) for ids in output.sampled_token_ids] if has_executed else [],
    )
    if plan is not None:
        scheduler.update_from_output(plan, output)
        if upstream.config.speculative_config is not None:
            scheduler.update_draft_token_ids(worker.take_draft_token_ids())
    return step if in_lockstep or has_executed else None


def main() -> None:
    """Start one rank, let it serve prompts, and print the result."""
    parser = scenario_parser(__doc__)
    parser.add_argument("--prompts", type=int, nargs="*", default=[], metavar="LENGTH")
    options = parser.parse_args()
    results = stdout_for_results()
    scenario = load_scenario(options.scenario, options.set)
    import_upstream(scenario.device_profile)
    case = served("prompts", options.set, options.prompts, "greedy", scenario=options.scenario, rank=options.rank)
    print(json.dumps(asdict(serve_case(case, scenario, options.rank))), file=results)


if __name__ == "__main__":
    main()

"""Audits upstream's own worker: the cases, the measuring and the judging are xlite_runner's, only who executes differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npusim.told import ToldTokens
from tests.upstream.engine import StartedRank, started
from xlite_runner.audit.account import audit_rank
from xlite_runner.audit.probe import run_audit
from xlite_runner.audit.result import RankAudit
from xlite_runner.budget import NonKVMemory
from xlite_runner.config import ModelConfig, RunnerConfig, check_and_update_config
from xlite_runner.kv_cache.planning import KVCacheConfig, plan_kv_cache
from xlite_runner.kv_cache.specs import FullAttentionSpec
from xlite_runner.memory_profiling import MemorySnapshot
from xlite_runner.scenario import Scenario
from xlite_runner.serving.output import CachedRequestData, NewRequestData, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams
from xlite_runner.simulation import WorldLedger
from xlite_runner.worker import WorkerMemory


@dataclass
class AuditResult:
    """An audit of upstream on one rank."""

    rank: RankAudit
    log_lines: list[str]


def audit_upstream(scenario: Scenario, rank: int = 0) -> AuditResult:
    """Start upstream on one rank and run on it what ``xlite-runner audit`` runs.

    Raises:
        Exception: What upstream raises at its start.
    """
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    told = ToldTokens(config.model.vocab_size, config.seed)
    engine_args = {"async_scheduling": False}
    with started(scenario, rank, told_values=told, engine_args=engine_args) as upstream:
        worker = UpstreamWorker(upstream, config)
        measurements = run_audit(worker, upstream.plan.num_blocks, WorldLedger(upstream.world))
        return AuditResult(audit_rank(worker, worker.plan, measurements), upstream.result.log_lines)


class UpstreamWorker:
    """Upstream's worker, as an audit looks at a worker.

    Args:
        upstream: After its start-up.
        config: What xlite_runner makes of the scenario; the cases follow from it.
    """

    def __init__(self, upstream: StartedRank, config: RunnerConfig) -> None:
        self._worker = upstream.worker
        self.config = config
        self.rank = upstream.result.rank
        self.device = upstream.worker.device
        self.model_runner = upstream.worker.model_runner
        self.memory = _memory(upstream)
        self.plan = _plan(upstream)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Execute a step and sample."""
        output = self._worker.execute_model(as_upstreams(scheduler_output))
        if output is None:
            self._worker.sample_tokens(None)


def _memory(upstream: StartedRank) -> WorkerMemory:
    worker, init = upstream.worker, upstream.worker.init_snapshot
    non_kv, available = None, worker.cache_config.kv_cache_memory_bytes
    if available is None:
        non_kv = NonKVMemory(
            weights=int(worker.model_runner.model_memory_usage),
            peak_activation=worker.peak_activation_memory,
            non_torch=worker.non_torch_memory,
        )
        available = worker.available_kv_cache_memory_bytes
    return WorkerMemory(
        init_snapshot=MemorySnapshot(
            torch_peak=init.torch_peak,
            free_memory=init.free_memory,
            total_memory=init.total_memory,
            torch_memory=init.torch_memory,
        ),
        requested=worker.requested_memory,
        non_kv=non_kv,
        available_kv_cache=available,
        graph=upstream.result.graph,
        graph_estimate=getattr(worker, "npugraph_memory_estimate", 0),
        after_stage=upstream.after_stage,
    )


def _plan(upstream: StartedRank) -> KVCacheConfig:
    specs = {
        name: FullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype_size=spec.dtype.itemsize,
        )
        for name, spec in upstream.worker.get_kv_cache_spec().items()
    }
    plan = plan_kv_cache(specs, upstream.plan.num_blocks)
    assert sum(tensor.num_bytes for tensor in plan.tensors) == sum(
        tensor.size for tensor in upstream.plan.kv_cache_tensors
    )
    return plan


def as_upstreams(step: SchedulerOutput) -> Any:
    """A step in upstream's classes."""
    from vllm.v1.core.sched.output import SchedulerOutput as UpstreamSchedulerOutput

    return UpstreamSchedulerOutput(
        scheduled_new_reqs=[_new_request(request) for request in step.scheduled_new_reqs],
        scheduled_cached_reqs=_cached_requests(step.scheduled_cached_reqs),
        num_scheduled_tokens=dict(step.num_scheduled_tokens),
        total_num_scheduled_tokens=step.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens={name: list(ids) for name, ids in step.scheduled_spec_decode_tokens.items()},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[step.num_common_prefix_blocks],
        finished_req_ids=set(step.finished_req_ids),
        free_encoder_mm_hashes=[],
    )


def _new_request(request: NewRequestData) -> Any:
    from vllm.v1.core.sched.output import NewRequestData as UpstreamNewRequestData

    return UpstreamNewRequestData(
        req_id=request.req_id,
        prompt_token_ids=list(request.prompt_token_ids),
        mm_features=[],
        sampling_params=_sampling_params(request.sampling_params),
        pooling_params=None,
        block_ids=(list(request.block_ids),),
        num_computed_tokens=request.num_computed_tokens,
        lora_request=None,
    )


def _sampling_params(params: SamplingParams) -> Any:
    from vllm import SamplingParams as UpstreamSamplingParams

    given: Mapping[str, Any] = params.model_dump(exclude_defaults=True)
    return UpstreamSamplingParams(
        detokenize=False, **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
    )


def _cached_requests(requests: CachedRequestData) -> Any:
    from vllm.v1.core.sched.output import CachedRequestData as UpstreamCachedRequestData

    return UpstreamCachedRequestData(
        req_ids=list(requests.req_ids),
        resumed_req_ids=set(requests.resumed_req_ids),
        new_token_ids=[],
        all_token_ids={name: list(ids) for name, ids in requests.all_token_ids.items()},
        new_block_ids=[None if ids is None else (list(ids),) for ids in requests.new_block_ids],
        num_computed_tokens=list(requests.num_computed_tokens),
        num_output_tokens=list(requests.num_output_tokens),
    )

"""Upstream's own worker under xlite_runner's audit: cases, measuring and judging are the same, upstream executes.

Needs torch_npu: to be imported in a world.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from npusim.errors import UnmodelledNameError
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
class UpstreamAudit:
    """What an audit of upstream on one rank found, and the lines that upstream logged."""

    rank: RankAudit
    log_lines: list[str]
    num_blocks: int


def audit_upstream(scenario: Scenario, rank: int = 0) -> UpstreamAudit:
    """As :func:`xlite_runner.simulation.audit`, on one rank of upstream.

    Raises:
        Exception: What upstream raises at its start.
    """
    first = _in_child(scenario, rank)
    if first.rank.ran_out_of_memory is None:
        return first
    half = scenario.model_copy(update={"num_gpu_blocks_override": first.num_blocks // 2})
    more = _in_child(half, rank, first.num_blocks)
    return UpstreamAudit(more.rank.after_running_out_of_memory(first.rank), first.log_lines, first.num_blocks)


def _in_child(*arguments: Any) -> UpstreamAudit:
    """In a process of its own, since upstream starts once in a process."""
    with get_context("fork").Pool(1) as child:
        return child.apply(_audit_once, arguments)


def _audit_once(scenario: Scenario, rank: int, configured_blocks: int | None = None) -> UpstreamAudit:
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    engine_args: dict[str, Any] = {"async_scheduling": False}
    if scenario.kv_transfer_config is not None:
        from vllm.config import KVTransferConfig

        engine_args["kv_transfer_config"] = KVTransferConfig(**scenario.kv_transfer_config.model_dump())
    told = ToldTokens(config.model.vocab_size, config.seed)
    with started(scenario, rank, told_values=told, engine_args=engine_args) as upstream:
        worker = UpstreamWorker(upstream, config)
        measurements = run_audit(worker, upstream.plan.num_blocks, WorldLedger(upstream.world))
        found = audit_rank(worker, worker.plan, measurements, configured_blocks)
        return UpstreamAudit(found, upstream.result.log_lines, upstream.plan.num_blocks)


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
        self.model_runner = _UpstreamModelRunner(upstream.worker.model_runner)
        self.memory = _memory(upstream)
        self.plan = _plan(upstream)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Execute a step and sample."""
        if self._worker.execute_model(as_upstreams(scheduler_output)) is None:
            self._worker.sample_tokens(None)

    def execute_fallback(self, num_tokens: int, *, foreign_metadata: bool) -> None:
        """Have the runner make no attention metadata for a dummy step, or another backend's before its own."""
        from vllm.config import CUDAGraphMode

        runner = self._worker.model_runner
        build = runner._build_attention_metadata

        def with_foreign(**arguments: Any) -> tuple[dict[str, Any], Any]:
            own, rest = build(**arguments)
            return {"layer of another backend": object(), **own}, rest

        runner._build_attention_metadata = with_foreign
        runner._should_build_dummy_attn_metadata = lambda *_: foreign_metadata
        try:
            runner._dummy_run(num_tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        finally:
            del runner._build_attention_metadata, runner._should_build_dummy_attn_metadata


class _UpstreamModelRunner:
    """Upstream's model runner, as far as an audit asks for it."""

    def __init__(self, runner: Any) -> None:
        self.model_memory_usage = int(runner.model_memory_usage)
        self.get_model = runner.get_model
        self.model = _Wrapped(runner.model) if "freq_cis" in vars(runner.model) else runner.model


class _Wrapped:
    """Upstream's ``XliteWrapper``, whose tensors xlite works from."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.adapter = self

    def tensors(self) -> Mapping[str, list[torch.Tensor]]:
        """By xlite's names."""
        native, tensors = self._wrapper.xlite_model, {"freqs_cis": [self._wrapper.freq_cis]}
        for name in dir(native):
            with suppress(UnmodelledNameError):  # of models that there is no adapter for here
                value = getattr(native, name)
                some = value if isinstance(value, list) else [value]
                if all(isinstance(tensor, torch.Tensor) for tensor in some):
                    tensors[name] = some
        return tensors


def _memory(upstream: StartedRank) -> WorkerMemory:
    worker, init = upstream.worker, upstream.worker.init_snapshot
    non_kv, available = None, worker.cache_config.kv_cache_memory_bytes
    if available is None:
        non_kv = NonKVMemory(
            weights=upstream.result.weights,
            peak_activation=upstream.result.peak_activation,
            non_torch=upstream.result.non_torch,
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
    return plan_kv_cache(specs, upstream.plan.num_blocks)


def as_upstreams(step: SchedulerOutput) -> Any:
    """A step in upstream's classes."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata
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
        kv_connector_metadata=ExampleConnectorMetadata(),  # nothing to transfer; read only where there is a connector
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

    given = params.model_dump(exclude_defaults=True)
    lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    return UpstreamSamplingParams(detokenize=False, **given | lists)


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

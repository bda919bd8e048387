"""What policy ``audited`` sets aside: what serving's worst cases take, measured before the KV cache is sized."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch_npu

from xlite_runner.audit.cases import AuditCase, audit_cases
from xlite_runner.audit.probe import Measurement, run_audit
from xlite_runner.budget import format_gib
from xlite_runner.config import RunnerConfig
from xlite_runner.errors import ReservationError
from xlite_runner.kv_cache.planning import KVCacheConfig, plan_kv_cache

if TYPE_CHECKING:
    from xlite_runner.worker import NPUWorker

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2
"""The null block, and one that all requests share."""
PAGE_BYTES = {True: 20 << 20, False: 2 << 20}
"""What the allocator takes at a time, with and without expandable segments (exact: torch_npu 2.13.0)."""

NUM_TRIES = 2
"""Sizes of the KV cache that are tried, on all ranks alike."""

FRAGMENTATION_BYTES = 100 << 20
"""By how much segments of the model's own steps differed between runs on KV caches of several sizes (assumed: seen with
Qwen3-30B-A3B, TP2 EP2, 8192 tokens, whose largest tensors have 128 MiB)."""


@dataclass(frozen=True, kw_only=True)
class ServingNeed:
    """What was in use at serving's worst moment beyond the KV cache, and the part of it that graph capture took."""

    total_bytes: int
    graph_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One run through all cases on a KV cache of its own.

    Attributes:
        need_bytes: In use at the worst moment beyond the cache's blocks.
    """

    need_bytes: int
    graph_bytes: int
    worst: Measurement
    last: Measurement


def measure_serving(worker: NPUWorker, kv_cache_beside: Callable[[int], float]) -> ServingNeed:
    """Run serving's worst cases on provisional KV caches, which are given back afterwards.

    What the first time leaves behind, such as communicators and the causal mask, is there before the KV cache of the
    next time, as it will be before the real one. Then the size is tried that the result of the time before leads to:
    which gaps between weights a tensor of the cache fits into, and so which are left for steps, depends on its size.
    The real cache may still end elsewhere in a page of the allocator, so that one page more may be in use.

    Steps of the model itself have tensors whose sizes follow from routing and whose segments are fragmented differently
    each time. Where there are such steps, :data:`FRAGMENTATION_BYTES` more are set aside.

    Args:
        worker: With its model loaded, and without KV cache. All ranks have to do this at the same time.
        kv_cache_beside: Bytes of the KV cache if serving takes so many besides.

    Raises:
        torch.OutOfMemoryError: A case does not even fit beside a small KV cache.
    """
    cases = audit_cases(worker.config)
    first = _run_all(worker, _plan(worker, 0), cases)
    last = first.last
    if last.error is not None:
        if last.ran_out_of_memory:
            raise last.error
        logger.warning("Serving fails whatever the memory: %s: %s", last.case.name, last.error)
        cases = cases[: cases.index(last.case)]
    rounding_bytes = _rounding_bytes(worker)
    fragmentation_bytes = FRAGMENTATION_BYTES if _runs_model_itself(worker.config) else 0
    needed = first.need_bytes + rounding_bytes + fragmentation_bytes
    for _ in range(NUM_TRIES):
        tried = needed
        measured = _run_all(worker, _plan(worker, kv_cache_beside(tried)), cases)
        if measured.last.error is None:
            needed = measured.need_bytes + rounding_bytes + fragmentation_bytes
        elif measured.last.ran_out_of_memory:
            needed = tried + rounding_bytes + FRAGMENTATION_BYTES
        else:
            raise measured.last.error
    needed = max(needed, tried)
    if measured.last.error is not None:
        logger.warning(
            "Serving ran out of memory beside the last KV cache that was tried: %s GiB more are set aside, untried.",
            format_gib(needed - tried),
        )
    logger.info(
        "Serving takes %s GiB besides the KV cache, at most in: %s.", format_gib(needed), measured.worst.case.name
    )
    return ServingNeed(total_bytes=needed, graph_bytes=measured.graph_bytes)


def check_kv_cache_memory(worker: NPUWorker, kv_cache_memory_bytes: int) -> None:
    """See that serving fits beside a KV cache of a given size, by running its worst cases beside as much as that.

    Raises:
        ReservationError: It does not.
    """
    free_at_start = worker.memory.init_snapshot.free_memory
    need = measure_serving(worker, lambda need: min(kv_cache_memory_bytes, free_at_start - need)).total_bytes
    at_most = free_at_start - need
    if kv_cache_memory_bytes > at_most:
        raise ReservationError(
            f"--kv-cache-memory={kv_cache_memory_bytes} ({format_gib(kv_cache_memory_bytes)} GiB): serving takes "
            f"{format_gib(need)} GiB besides the KV cache, so that at most --kv-cache-memory={max(at_most, 0)} "
            f"({format_gib(max(at_most, 0))} GiB) fits into the memory that was free on startup."
        )


def _plan(worker: NPUWorker, available_bytes: float) -> KVCacheConfig:
    """As many blocks as that is for."""
    specs = worker.model_runner.get_kv_cache_spec()
    bytes_per_block = plan_kv_cache(specs, 1).group.bytes_per_block
    return plan_kv_cache(specs, max(MIN_BLOCKS, int(available_bytes) // bytes_per_block))


def _rounding_bytes(worker: NPUWorker) -> int:
    """By how much more than the provisional cache the real one may exceed its tensors."""
    is_expandable = "expandable_segments:True" in worker.config.environment["PYTORCH_NPU_ALLOC_CONF"]
    num_tensors = 2 * len(worker.model_runner.get_kv_cache_spec())
    return PAGE_BYTES[is_expandable] * (1 if is_expandable else num_tensors)


def _run_all(worker: NPUWorker, plan: KVCacheConfig, cases: Sequence[AuditCase]) -> _Pass:
    runner = worker.model_runner
    free_at_start = worker.memory.init_snapshot.free_memory
    runner.initialize_kv_cache(plan)
    graph_bytes = 0 if worker.config.compilation.enforce_eager else runner.graphs.capture_model()
    measurements = run_audit(worker, plan.num_blocks, cases=cases)
    runner.drop_kv_cache()
    runner.graphs.drop()
    gc.collect()
    torch_npu.npu.empty_cache()
    worst = max(measurements, key=lambda case: case.peak_in_use_bytes(free_at_start))
    return _Pass(
        need_bytes=worst.peak_in_use_bytes(free_at_start) - plan.num_blocks * plan.group.bytes_per_block,
        graph_bytes=graph_bytes,
        worst=worst,
        last=measurements[-1],
    )


def _runs_model_itself(config: RunnerConfig) -> bool:
    xlite = config.ascend.xlite_graph_config
    is_xlites_alone = xlite.enabled and xlite.full_mode and config.speculative is None
    return not is_xlites_alone or config.audit.fallback_paths

"""The engine's start-up: takes all workers through their stages and plans the KV cache between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # exported, but not by name

from xlite_runner.audit.account import audit_rank
from xlite_runner.audit.probe import DeviceLedger, run_audit
from xlite_runner.audit.result import RankAudit
from xlite_runner.budget import suggest_kv_cache_memory
from xlite_runner.config import ProfilePolicy, RunnerConfig
from xlite_runner.kv_cache import KVCacheSpec, get_kv_cache_configs
from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.memory_profiling import MemoryUse
from xlite_runner.result import LedgerRow, ProfileResult, RankResult
from xlite_runner.worker import NPUWorker, XliteWorker

T = TypeVar("T")


class RunRanks(Protocol):
    """Runs one function per rank, at the same time or in turns, and returns their results by rank."""

    def __call__(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run them; an error on any rank is raised."""
        ...


class EngineCore:
    """All workers of one engine.

    Args:
        config: The engine's configuration.
        policy: What the profile run executes in xlite full mode.
        run_ranks: How the workers run: in turns in this process, or one alone.
        store: Where they find each other.
        on_stage: Told of each of the :data:`xlite_runner.stages.STAGES` before it starts.
    """

    def __init__(
        self,
        config: RunnerConfig,
        policy: ProfilePolicy,
        run_ranks: RunRanks,
        store: Store,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self._run_ranks = run_ranks
        self._on_stage = on_stage
        ranks = range(config.parallel.num_ranks)
        kind = XliteWorker if config.ascend.xlite_graph_config.enabled else NPUWorker
        self.workers: list[NPUWorker] = [kind(config, rank, rank, store, policy) for rank in ranks]
        self.kv_cache_configs: list[KVCacheConfig] = []

    def start(self) -> None:
        """Take all workers from opening their devices to being ready to serve.

        Raises:
            ValueError: Too little memory, at the start or for the KV cache; upstream's text.
            AssertionError: Free memory grew during profiling; upstream's text.
            torch.OutOfMemoryError: A device has no room for weights, activations or the KV cache.
        """
        self._stage("init_device", NPUWorker.init_device)
        self._stage("load_model", NPUWorker.load_model)
        available = self._stage("determine_available_memory", NPUWorker.determine_available_memory)
        specs = self._run_ranks([worker.get_kv_cache_spec for worker in self.workers])
        self.kv_cache_configs = self._plan_kv_cache(specs, available)
        plans = iter(self.kv_cache_configs)
        self._stage("initialize_from_config", lambda worker: worker.initialize_from_config(next(plans)))
        self._stage("compile_or_warm_up_model", NPUWorker.compile_or_warm_up_model)

    def _plan_kv_cache(
        self, specs: Sequence[Mapping[str, KVCacheSpec]], available: Sequence[int]
    ) -> list[KVCacheConfig]:
        """Each replica plans for itself, as upstream's engine cores do, which do not bring their sizes together.

        Exact: vllm 0.22.1 and 0.23.0, ``EngineCore._initialize_kv_caches``.
        """
        size = self.config.parallel.world_size
        replicas = [slice(first, first + size) for first in range(0, len(specs), size)]
        plans = [get_kv_cache_configs(specs[ranks], available[ranks], self.config) for ranks in replicas]
        return [plan for of_replica in plans for plan in of_replica]

    @property
    def num_gpu_blocks(self) -> list[int]:
        """Blocks of the KV cache, by replica."""
        return [plan.num_blocks for plan in self.kv_cache_configs[:: self.config.parallel.world_size]]

    def _stage(self, name: str, run: Callable[[NPUWorker], T]) -> list[T]:
        def staged(worker: NPUWorker) -> T:
            result = run(worker)
            worker.memory.after_stage[name] = MemoryUse.measure(worker.device)
            return result

        if self._on_stage is not None:
            self._on_stage(name)
        return self._run_ranks([partial(staged, worker) for worker in self.workers])

    def audit(self, ledger: DeviceLedger | None = None, configured_blocks: int | None = None) -> tuple[RankAudit, ...]:
        """Run what serving does at worst, after :meth:`start`, and compare with what was reserved. By rank.

        Args:
            ledger: Who holds the devices' memory, if that is known.
            configured_blocks: Blocks of the KV cache that the figures are to be for, if there are fewer now.
        """
        if self._on_stage is not None:
            self._on_stage("audit")

        def audit(worker: NPUWorker, plan: KVCacheConfig) -> RankAudit:
            measurements = run_audit(worker, plan.num_blocks, ledger)
            return audit_rank(worker, plan, measurements, configured_blocks)

        ranks = zip(self.workers, self.kv_cache_configs, strict=True)
        return tuple(self._run_ranks([partial(audit, worker, plan) for worker, plan in ranks]))

    def result(
        self,
        log_lines: Sequence[str] = (),
        ledgers: Sequence[Sequence[LedgerRow]] = (),
        event_log_digest: str | None = None,
    ) -> ProfileResult:
        """What :meth:`start` measured.

        Args:
            log_lines: What was logged meanwhile.
            ledgers: Who owns each device's memory, by rank, if that is known.
            event_log_digest: Identifies what the simulated world did.
        """
        plan = min(self.kv_cache_configs, key=lambda plan: plan.num_blocks)
        max_model_len = self.config.scheduler.max_model_len
        return ProfileResult(
            policy=self.policy.value,
            ranks=tuple(_rank_result(worker, ledgers[worker.rank] if ledgers else ()) for worker in self.workers),
            num_gpu_blocks=plan.num_blocks,
            num_kv_cache_tokens=plan.num_tokens(max_model_len),
            max_concurrency=plan.max_concurrency(max_model_len),
            log_lines=tuple(log_lines),
            event_log_digest=event_log_digest,
        )


def _rank_result(worker: NPUWorker, ledger: Sequence[LedgerRow]) -> RankResult:
    memory = worker.memory
    non_kv, init = memory.non_kv, memory.init_snapshot
    suggestions = (
        None if non_kv is None else suggest_kv_cache_memory(memory.requested, init.free_memory, non_kv, memory.graph)
    )
    return RankResult(
        rank=worker.rank,
        total_memory_bytes=init.total_memory,
        free_memory_at_start_bytes=init.free_memory,
        requested_memory_bytes=int(memory.requested),
        weights_bytes=worker.model_runner.model_memory_usage,
        peak_activation_bytes=non_kv.peak_activation if non_kv else 0,
        non_torch_bytes=non_kv.non_torch if non_kv else 0,
        graph_bytes=memory.graph,
        graph_estimate_bytes=memory.graph_estimate,
        available_kv_cache_bytes=int(memory.available_kv_cache),
        kv_cache_bytes=worker.kv_cache_bytes,
        serving_bytes=non_kv.serving if non_kv else 0,
        xlite_pool_mb=worker.model_runner.xlite_pool_mb,
        suggested_kv_cache_memory_bytes=suggestions.fit_requested if suggestions else None,
        suggested_kv_cache_memory_full_bytes=suggestions.use_free if suggestions else None,
        ledger=tuple(ledger),
    )

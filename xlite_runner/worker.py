"""One worker: one rank on one device, from opening the device to being ready to serve."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch_npu
from torch.distributed import Store  # type: ignore[attr-defined]  # exported, but not by name

from xlite_runner.audit.reservation import check_kv_cache_memory, measure_serving
from xlite_runner.budget import (
    GIB,
    NonKVMemory,
    available_kv_cache_memory,
    available_kv_cache_message,
    format_gib,
    free_memory_message,
    graph_estimate_message,
    graph_memory_message,
    requested_memory,
)
from xlite_runner.config import CUDAGraphMode, ProfilePolicy, RunnerConfig
from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.kv_cache.specs import KVCacheSpec
from xlite_runner.memory_profiling import MemorySnapshot, MemoryUse, memory_profiling
from xlite_runner.parallel_state import initialize_parallel_state
from xlite_runner.runner import NPUModelRunner, XliteModelRunner
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class WorkerMemory:
    """What a worker has measured so far, in bytes.

    Attributes:
        after_stage: What was in use after each of :data:`xlite_runner.stages.STAGES`.
    """

    init_snapshot: MemorySnapshot
    requested: float
    non_kv: NonKVMemory | None = None
    available_kv_cache: float = 0.0
    graph: int = 0
    graph_estimate: int = 0
    after_stage: dict[str, MemoryUse] = field(default_factory=dict)


class NPUWorker:
    """A worker without xlite.

    Args:
        config: The engine's configuration.
        rank: Number among all workers.
        local_rank: Index of its device.
        store: Where the workers find each other.
        policy: What is executed to find out how much memory the KV cache can have.
    """

    def __init__(
        self,
        config: RunnerConfig,
        rank: int,
        local_rank: int,
        store: Store,
        policy: ProfilePolicy = ProfilePolicy.RUNNABLE,
    ) -> None:
        self.config = config
        self.policy = policy
        self.rank = rank
        self.local_rank = local_rank
        self._store = store
        self.device = torch.device("npu", local_rank)
        self.memory: WorkerMemory
        self.model_runner: NPUModelRunner
        self.kv_cache_bytes = 0

    def init_device(self) -> None:
        """Open the device, take the baseline of its memory, join the other workers, make the runner.

        Raises:
            ValueError: Less is free than the utilization asks for; upstream's text.
        """
        torch_npu.npu.set_device(self.device)
        gc.collect()
        torch_npu.npu.empty_cache()
        snapshot = MemorySnapshot.measure(self.device)
        utilization = self.config.cache.gpu_memory_utilization
        requested = requested_memory(snapshot.total_memory, utilization)
        self.memory = WorkerMemory(init_snapshot=snapshot, requested=requested)
        if snapshot.free_memory < requested:
            raise ValueError(
                f"Free memory on device ({format_gib(snapshot.free_memory)}/{format_gib(snapshot.total_memory)} GiB) "
                f"on startup is less than desired GPU memory utilization ({utilization}, {format_gib(requested)} GiB). "
                "Decrease GPU memory utilization or reduce GPU memory used by other processes."
            )
        parallel = self.config.parallel
        dist.init_process_group("hccl", store=self._store, rank=self.rank, world_size=parallel.num_ranks)
        groups = initialize_parallel_state(
            parallel, self.rank, self.local_rank, is_moe=self.config.model.moe is not None
        )
        torch_npu.npu.manual_seed_all(self.config.seed)
        self.model_runner = self._make_runner(groups)

    def _make_runner(self, groups: object) -> NPUModelRunner:
        return NPUModelRunner(self.config, groups, self.device)  # type: ignore[arg-type]

    def load_model(self) -> None:
        """Load the weights."""
        with torch.inference_mode():
            self.model_runner.load_model()

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """What the cache of each layer needs."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Profile, and return the bytes that are left for the KV cache; negative if nothing is.

        With ``kv_cache_memory_bytes`` the profile run still happens, but its memory is not looked at.

        Raises:
            AssertionError: Free memory grew meanwhile, so that the figures mean nothing; upstream's text.
            ReservationError: Under policy ``audited``, serving does not fit beside the ``kv_cache_memory_bytes``.
        """
        init = self.memory.init_snapshot
        if kv_cache_memory_bytes := self.config.cache.kv_cache_memory_bytes:
            self.model_runner.profile_run()
            if self.policy is ProfilePolicy.AUDITED:
                check_kv_cache_memory(self, kv_cache_memory_bytes)
            logger.info(
                "Initial free memory %.2f GiB, reserved %.2f GiB for KV Cache as specified by kv_cache_memory_bytes, "
                "skipping memory profiling. This does not respect the gpu_memory_utilization config. Only use "
                "kv_cache_memory_bytes when you want manual control of KV cache memory size. If OOM'ed, check the "
                "difference of initial free memory between the current run and the previous run where "
                "kv_cache_memory_bytes is suggested and update it correspondingly.",
                init.free_memory / GIB,
                kv_cache_memory_bytes / GIB,
            )
            self.memory.available_kv_cache = kv_cache_memory_bytes
            return kv_cache_memory_bytes

        with memory_profiling(init, self.model_runner.model_memory_usage, self.device) as result:
            self.model_runner.profile_run()
            # Read before graphs are captured, whose pools would raise it.
            profile_torch_peak = torch_npu.npu.memory_stats(self.device).get("allocated_bytes.all.peak", 0)
            if self._estimates_graphs:
                self.memory.graph_estimate = self.model_runner.graphs.profile_cudagraph_memory()
        non_kv = NonKVMemory(
            weights=result.weights_memory,
            peak_activation=profile_torch_peak - result.before_profile.torch_peak,
            non_torch=result.non_torch_increase,
        )
        if self.policy is ProfilePolicy.AUDITED:
            need = measure_serving(self, lambda need: self.memory.requested - need)
            self.memory.graph_estimate = need.graph_bytes
            non_kv = replace(non_kv, serving=need.total_bytes - non_kv.total - need.graph_bytes)
        free_memory = result.after_profile.free_memory
        if init.free_memory <= free_memory:
            raise AssertionError(
                f"Error in memory profiling. Initial free memory {init.free_memory / GIB} GiB, current free memory "
                f"{free_memory / GIB} GiB. This happens when other processes sharing the same container release GPU "
                "memory while vLLM is profiling during initialization. To fix this, ensure consistent GPU memory "
                "allocation or isolate vLLM in its own container."
            )
        self.memory.non_kv = non_kv
        self.memory.available_kv_cache = available_kv_cache_memory(
            self.memory.requested, non_kv, self.memory.graph_estimate
        )
        logger.info("%s", available_kv_cache_message(self.memory.available_kv_cache))
        if self._estimates_graphs and self.memory.graph_estimate > 0:
            utilization = self.config.cache.gpu_memory_utilization
            logger.info("%s", graph_estimate_message(utilization, self.memory.graph_estimate, init.total_memory))
        return int(self.memory.available_kv_cache)

    @property
    def _estimates_graphs(self) -> bool:
        """Whether memory is set aside for graphs: vllm-ascend 0.22.1 did so by default, 0.23.0 does not any more."""
        wanted = self.config.environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS") == "1"
        return wanted and self.config.compilation.cudagraph_mode is not CUDAGraphMode.NONE

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache."""
        before = torch_npu.npu.memory_allocated(self.device)
        self.model_runner.initialize_kv_cache(kv_cache_config)
        self.kv_cache_bytes = torch_npu.npu.memory_allocated(self.device) - before

    def compile_or_warm_up_model(self) -> None:
        """Capture graphs, and say where the memory went.

        Upstream also runs sizes that torch.compile compiles for; with its defaults all of them are captured.
        """
        if not self.config.compilation.enforce_eager:
            self.memory.graph = self.model_runner.graphs.capture_model()
        memory = self.memory
        if memory.graph_estimate > 0:
            logger.info("%s", graph_memory_message(memory.graph, memory.graph_estimate))
        if memory.non_kv is not None:
            logger.info(
                "%s",
                free_memory_message(
                    total=memory.init_snapshot.total_memory,
                    free_at_start=memory.init_snapshot.free_memory,
                    gpu_memory_utilization=self.config.cache.gpu_memory_utilization,
                    requested=memory.requested,
                    non_kv=memory.non_kv,
                    graph=memory.graph,
                    available=memory.available_kv_cache,
                ),
            )
        torch_npu.npu.manual_seed_all(self.config.seed)

    # ---- serving

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step of the scheduler and sample its tokens.

        Raises:
            RuntimeError: xlite's own checks, e.g. of more tokens than its pool is for.
            torch.OutOfMemoryError: The step does not fit beside the KV cache.
        """
        output = self.model_runner.steps.execute_model(scheduler_output)
        return self.model_runner.steps.sample_tokens() if output is None else output

    def execute_fallback(self, num_tokens: int, *, foreign_metadata: bool) -> None:
        """Take the model through tokens without meaning in a step that xlite's full mode leaves to the model itself.

        Args:
            num_tokens: Tokens of the step.
            foreign_metadata: The first metadata is another backend's; else there is no metadata.
        """
        self.model_runner.run_fallback(num_tokens, foreign_metadata=foreign_metadata)

    def execute_dummy_batch(self) -> None:
        """Take part in a step that this data-parallel rank has no requests for: one decode step of one request."""
        self.model_runner._dummy_run(self.config.uniform_decode_query_len, uniform_decode=True)


class XliteWorker(NPUWorker):
    """A worker with xlite."""

    def _make_runner(self, groups: object) -> NPUModelRunner:
        return XliteModelRunner(self.config, groups, self.device, self.policy)  # type: ignore[arg-type]

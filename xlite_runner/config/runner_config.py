"""The effective configuration of one engine: user settings after the platform's rules. Frozen, nothing global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from xlite_runner.config.engine_args import AuditArgs
from xlite_runner.config.model_config import ModelConfig
from xlite_runner.config.parallel_config import ParallelConfig


class ProfilePolicy(Enum):
    """What the memory-profiling run executes when xlite runs in full mode."""

    RUNNABLE = "runnable"
    """The ACL-graph runnable, as for any other model (vllm-ascend before PR #11380)."""
    SKIP = "skip"
    """Nothing: the wrapper returns its hidden-states buffer (PR #11380)."""
    AUDITED = "audited"
    """Nothing either, but then serving's worst cases run for real, and what they take is set aside."""


class CUDAGraphMode(Enum):
    """Which forwards are captured as device graphs (upstream's name; on Ascend these are ACL graphs).

    A forward runs in one of the first three modes; a configuration can also have one of the others.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    """Everything but attention is captured, in pieces."""
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    """FULL for decode steps, PIECEWISE for others."""

    @property
    def has_full_cudagraphs(self) -> bool:
        """Whether some forwards run in mode FULL."""
        return self not in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)

    @property
    def has_piecewise_cudagraphs(self) -> bool:
        """Whether some forwards run in mode PIECEWISE."""
        return self in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


class SchedulingPolicy(Enum):
    """Who is served first, and who is preempted."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    """By the requests' ``priority``, lower is earlier; among equals by arrival."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduling step. Lengths in tokens.

    Attributes:
        long_prefill_token_threshold: Most tokens of one request in one step, 0 for no such limit.
        scheduler_reserve_full_isl: Whether a request starts only when there are blocks for its whole prompt.
        async_scheduling: Whether the next step is composed while one runs.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False

    @property
    def max_num_scheduled_tokens(self) -> int:
        """Tokens that the scheduler may issue in a step; an MTP drafter, the only one here, adds none to them."""
        return self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: tokens per block, and the memory it may take.

    With ``kv_cache_memory_bytes`` the utilization is not respected. With ``aligned_for_transfer`` every tensor begins
    at a multiple of 2 MiB, as the transfer of KV caches between engines wants it.
    """

    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    aligned_for_transfer: bool = False


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Graph capture: mode and, ascending, the token counts to capture (empty with mode NONE or ``enforce_eager``)."""

    enforce_eager: bool
    cudagraph_mode: CUDAGraphMode
    cudagraph_capture_sizes: tuple[int, ...] = ()

    @property
    def max_cudagraph_capture_size(self) -> int:
        """The largest captured token count, 0 if nothing is captured."""
        return max(self.cudagraph_capture_sizes, default=0)


@dataclass(frozen=True, kw_only=True)
class XliteGraphConfig:
    """Whether xlite executes the model, and if so every step (``full_mode``) or only decode steps."""

    enabled: bool = False
    full_mode: bool = False


@dataclass(frozen=True, kw_only=True)
class AscendConfig:
    """Settings of the Ascend platform (``additional_config`` upstream)."""

    xlite_graph_config: XliteGraphConfig


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding."""

    num_speculative_tokens: int


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Everything a worker needs to know; the counterpart of upstream's ``VllmConfig``.

    ``environment`` holds the environment variables after the platform's rules. Get one from
    :func:`xlite_runner.config.check_and_update_config`.
    """

    model: ModelConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    compilation: CompilationConfig
    ascend: AscendConfig
    speculative: SpeculativeConfig | None
    environment: Mapping[str, str]
    seed: int
    audit: AuditArgs

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens that one request contributes to a decode step."""
        return 1 + (self.speculative.num_speculative_tokens if self.speculative else 0)

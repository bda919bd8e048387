"""What a user can set about the engine, before the platform's rules. Names, ranges and defaults are upstream's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, Strict

from xlite_runner.config.environment import validate_environment


class XliteGraphArgs(BaseModel):
    """The table ``xlite_graph_config`` of upstream's ``additional_config``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = False
    full_mode: bool = False


class KVTransferArgs(BaseModel):
    """Upstream's ``kv_transfer_config``, as far as it changes what is allocated: whether there is one."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kv_connector: str = Field(min_length=1)
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]


SamplingFeature = Literal[
    "temperature", "top_p", "top_k", "min_p", "penalties", "logprobs", "seed", "allowed_token_ids", "prompt_logprobs"
]
"""Named like the sampling parameters of vLLM; ``penalties`` stands for all three."""


class AuditArgs(BaseModel):
    """What serving may do, as far as an audit of the memory set aside for it has to know (``docs/audit.md``).

    Attributes:
        sampling: What clients may use; without any, sampling is greedy.
        fallback_paths: Whether steps may come to the model itself in xlite's full mode.
        sleep_level: The deepest level at which the engine may be put to sleep; 0 is never.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    sampling: Annotated[tuple[SamplingFeature, ...], Strict(False)] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "penalties",
        "logprobs",
        "seed",
        "allowed_token_ids",
    )
    fallback_paths: bool = False
    sleep_level: Literal[0, 1, 2] = 0


class EngineArgs(BaseModel):
    """Engine settings as the user gives them; None stands for "upstream decides".

    Lengths are in tokens, memory in bytes. ``environment`` holds the variables that upstream reads from the process.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    enable_expert_parallel: bool = False
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: NonNegativeInt = 0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    block_size: PositiveInt | None = None
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    kv_cache_memory_bytes: PositiveInt | None = None
    num_gpu_blocks_override: PositiveInt | None = None
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = "auto"
    enforce_eager: bool = False
    num_speculative_tokens: PositiveInt | None = None
    xlite_graph_config: XliteGraphArgs = XliteGraphArgs()
    kv_transfer_config: KVTransferArgs | None = None
    audit: AuditArgs = AuditArgs()
    environment: Annotated[dict[str, str], BeforeValidator(validate_environment)] = Field(default_factory=dict)
    seed: NonNegativeInt = 0

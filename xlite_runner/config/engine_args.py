"""What a user can set about the engine, before the platform's rules. Names, ranges and defaults are upstream's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from xlite_runner.config.environment import validate_environment


class XliteGraphArgs(BaseModel):
    """The table ``xlite_graph_config`` of upstream's ``additional_config``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = False
    full_mode: bool = False


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
    environment: Annotated[dict[str, str], BeforeValidator(validate_environment)] = Field(default_factory=dict)
    seed: NonNegativeInt = 0

"""The platform's rules: from the user's settings to the effective configuration.

Rules, order and wording follow vLLM 0.23 and vllm-ascend 0.23 (``vllm_ascend/platform.py``, ``ascend_config.py``,
``utils.py``). Errors in upstream's place have upstream's class and text.
"""

from __future__ import annotations

import dataclasses
import logging

from xlite_runner.config.engine_args import EngineArgs
from xlite_runner.config.model_config import Dtype, ModelConfig
from xlite_runner.config.parallel_config import ParallelConfig
from xlite_runner.config.runner_config import (
    AscendConfig,
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    RunnerConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    XliteGraphConfig,
)
from xlite_runner.errors import ScenarioError, UnsupportedModelError

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
"""Of ``vllm serve``; the offline ``LLM`` class has 8192."""
DEFAULT_BLOCK_SIZE = 16
MAX_CAPTURE_SIZE = 512
_EXCLUDE_EXPANDABLE_SEGMENTS = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")
_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}


def check_and_update_config(args: EngineArgs, model: ModelConfig) -> RunnerConfig:
    """Apply the platform's rules to the user's settings.

    Args:
        args: What the user set.
        model: The model, as its ``config.json`` describes it.

    Returns:
        The effective configuration. What was changed is logged as upstream logs it.

    Raises:
        ValueError: Settings that contradict each other or the model, in upstream's words.
        RuntimeError: Settings that xlite cannot run, in upstream's words.
        ScenarioError: Settings that upstream runs and this runner does not.
        UnsupportedModelError: The model cannot be split over that many devices.
    """
    if args.dtype != "auto":
        model = dataclasses.replace(model, dtype=_DTYPES[args.dtype])
    max_model_len = _max_model_len(args, model)
    parallel = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=args.data_parallel_size if model.moe is not None else 1,
        num_independent_replicas=args.data_parallel_size if model.moe is None else 1,
        enable_expert_parallel=args.enable_expert_parallel,
    )
    scheduler = _scheduler_config(args, max_model_len)
    _verify_with_parallel_config(model, parallel)
    block_size = args.block_size or DEFAULT_BLOCK_SIZE
    xlite = _xlite_graph_config(args, block_size)
    compilation = _compilation_config(args, scheduler, xlite)
    _verify_launch_blocking(args, compilation)
    if xlite.enabled:
        logger.info("openEuler Xlite enabled. See: https://atomgit.com/openeuler/GVirt/tree/master/xlite")
    num_speculative_tokens = args.num_speculative_tokens
    return RunnerConfig(
        model=model,
        parallel=parallel,
        scheduler=scheduler,
        cache=CacheConfig(
            block_size=_refreshed_block_size(args, block_size, xlite),
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            num_gpu_blocks_override=args.num_gpu_blocks_override,
            enable_prefix_caching=args.enable_prefix_caching,
            aligned_for_transfer=args.kv_transfer_config is not None,
        ),
        compilation=compilation,
        ascend=AscendConfig(xlite_graph_config=xlite),
        speculative=SpeculativeConfig(num_speculative_tokens) if num_speculative_tokens else None,
        environment=effective_environment(args),
        seed=args.seed,
        audit=args.audit,
    )


def _max_model_len(args: EngineArgs, model: ModelConfig) -> int:
    derived = model.derived_max_model_len
    if args.max_model_len is None or args.max_model_len <= derived:
        return args.max_model_len or int(derived)
    message = (
        f"User-specified max_model_len ({args.max_model_len}) is greater than the derived max_model_len "
        f"(max_position_embeddings={float(derived)} or model_max_length=None in model's config.json)."
    )
    caution = (
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. If the model uses relative position encoding "
        "(RoPE), positions exceeding derived_max_model_len lead to nan. If the model uses absolute position encoding, "
        "positions exceeding derived_max_model_len will cause a CUDA array out-of-bounds error."
    )
    if args.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise ValueError(
            f"{message} To allow overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. {caution}"
        )
    logger.warning("%s %s", message, caution)
    return args.max_model_len


def _scheduler_config(args: EngineArgs, max_model_len: int) -> SchedulerConfig:
    max_num_seqs = args.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens = args.max_num_batched_tokens
    if max_num_batched_tokens is None:
        floor = DEFAULT_MAX_NUM_BATCHED_TOKENS
        max_num_batched_tokens = floor if args.enable_chunked_prefill else max(max_model_len, floor)
        max_num_batched_tokens = min(max_num_seqs * max_model_len, max_num_batched_tokens)
    if args.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    if args.enable_chunked_prefill:
        logger.info("Chunked prefill is enabled with max_num_batched_tokens=%d.", max_num_batched_tokens)
    elif max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is smaller than max_model_len ({max_model_len}). "
            "This effectively limits the maximum sequence length to max_num_batched_tokens and makes vLLM reject "
            "longer sequences. Please increase max_num_batched_tokens or decrease max_model_len."
        )
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be greater than or equal to max_num_seqs "
            f"({max_num_seqs})."
        )
    if max_num_batched_tokens > max_num_seqs * max_model_len:
        logger.warning(
            "max_num_batched_tokens (%d) exceeds max_num_seqs * max_model_len (%d). "
            "This may lead to unexpected behavior.",
            max_num_batched_tokens,
            max_num_seqs * max_model_len,
        )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=SchedulingPolicy(args.scheduling_policy),
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        scheduler_reserve_full_isl=args.scheduler_reserve_full_isl,
        async_scheduling=args.async_scheduling,
    )


def _verify_with_parallel_config(model: ModelConfig, parallel: ParallelConfig) -> None:
    tp_size = parallel.tensor_parallel_size
    if model.num_attention_heads % tp_size:
        raise ValueError(
            f"Total number of attention heads ({model.num_attention_heads}) must be divisible by tensor parallel size "
            f"({tp_size})."
        )
    if parallel.enable_expert_parallel and model.moe is None:
        raise ValueError("Number of experts in the model must be greater than 0 when expert parallelism is enabled.")
    # Most of the rest are bare assertions deep in upstream's model code.
    _require_multiple(
        "vocab_size, padded to 64 times a number,", model.padded_vocab_size, "tensor_parallel_size", tp_size
    )
    num_kv_heads = model.num_key_value_heads
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads ({num_kv_heads}) must be a multiple or a divisor of tensor_parallel_size ({tp_size})"
        )
    if model.moe is None:
        _require_multiple("intermediate_size", model.intermediate_size, "tensor_parallel_size", tp_size)
        return
    if not parallel.enable_expert_parallel:
        divisor_name = "tensor_parallel_size * data_parallel_size"
        _require_multiple("moe_intermediate_size", model.moe.moe_intermediate_size, divisor_name, parallel.moe_tp_size)
    if tp_size > model.moe.num_experts:
        raise ValueError(
            f"Tensor parallel size {tp_size} is greater than the number of experts {model.moe.num_experts}."
        )
    _require_multiple("num_experts", model.moe.num_experts, "expert parallel size", parallel.moe_ep_size)


def _verify_launch_blocking(args: EngineArgs, compilation: CompilationConfig) -> None:
    if (
        compilation.cudagraph_mode is not CUDAGraphMode.NONE
        and args.environment.get("ASCEND_LAUNCH_BLOCKING", "0") == "1"
    ):
        raise ValueError(
            "ACL graph is incompatible with ASCEND_LAUNCH_BLOCKING=1. Please unset ASCEND_LAUNCH_BLOCKING or set it to "
            "0. If you need ASCEND_LAUNCH_BLOCKING for debugging, consider other methods — for example, check the plog "
            "files (default: $HOME/ascend/log/debug) for more information about runtime errors."
        )


def _require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise UnsupportedModelError(f"{name} ({value}) must be a multiple of {divisor_name} ({divisor})")


def _xlite_graph_config(args: EngineArgs, block_size: int) -> XliteGraphConfig:
    xlite = XliteGraphConfig(enabled=args.xlite_graph_config.enabled, full_mode=args.xlite_graph_config.full_mode)
    if xlite.enabled:
        if args.num_speculative_tokens not in (None, 1):
            raise RuntimeError("Xlite graph mode only support speculative decoding with num_speculative_tokens=1.")
        if args.pipeline_parallel_size > 1:
            raise RuntimeError(
                "Xlite graph mode is not compatible with pipeline parallelism. Please set pipeline_parallel_size to 1."
            )
        if block_size != 128:
            logger.warning(
                "Current cache block size may not be optimal for xlite graph mode. "
                "current_block_size=%d, recommended_block_size=128.",
                block_size,
            )
    if args.pipeline_parallel_size > 1:
        raise ScenarioError(f"pipeline_parallel_size = {args.pipeline_parallel_size} is not supported; allowed: 1")
    return xlite


def _compilation_config(args: EngineArgs, scheduler: SchedulerConfig, xlite: XliteGraphConfig) -> CompilationConfig:
    enforce_eager = args.enforce_eager
    mode = CUDAGraphMode.NONE if enforce_eager else CUDAGraphMode.FULL_AND_PIECEWISE
    if xlite.enabled:
        if xlite.full_mode and args.num_speculative_tokens is None:
            logger.info("ACLGraph has been disabled when speculation is disabled in xlite full mode")
            enforce_eager = True
            mode = CUDAGraphMode.NONE
        else:
            logger.info("Falling back to FULL_DECODE_ONLY under xlite decode-only mode")
            mode = CUDAGraphMode.FULL_DECODE_ONLY
    if enforce_eager:
        logger.info("Compilation disabled, using eager mode by default")
        return CompilationConfig(enforce_eager=True, cudagraph_mode=mode)
    decode_query_len = 1 + (args.num_speculative_tokens or 0)
    wanted = min(scheduler.max_num_seqs * decode_query_len, MAX_CAPTURE_SIZE)
    largest = min(wanted, scheduler.max_num_batched_tokens)
    candidates = {1, 2, 4, *range(8, 256, 8), *range(256, MAX_CAPTURE_SIZE + 1, 16), scheduler.max_num_batched_tokens}
    sizes = tuple(sorted(size for size in candidates if size <= largest))
    if sizes[-1] != wanted:
        logger.warning("Truncating max_cudagraph_capture_size to %d", sizes[-1])
    return CompilationConfig(enforce_eager=False, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)


def _refreshed_block_size(args: EngineArgs, block_size: int, xlite: XliteGraphConfig) -> int:
    if block_size == 128:
        return 128
    if args.enable_prefix_caching or args.enable_chunked_prefill:
        logger.info("Block size is set to 128 if prefix cache or chunked prefill is enabled.")
        return 128
    if xlite.enabled and block_size > 128:
        logger.warning(
            "Setting block size for xlite compatibility. original_block_size=%d, new_block_size=128. "
            "xlite_graph_config requires block_size <= 128.",
            block_size,
        )
        return 128
    return block_size


def effective_environment(args: EngineArgs) -> dict[str, str]:
    """The environment variables of an engine: the user's, and what the platform adds to them."""
    alloc_conf = args.environment.get("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    if not any(option in alloc_conf for option in _EXCLUDE_EXPANDABLE_SEGMENTS):
        alloc_conf += ",expandable_segments:True"
    logger.info("Set PYTORCH_NPU_ALLOC_CONF=%s", alloc_conf)
    return {**args.environment, "PYTORCH_NPU_ALLOC_CONF": alloc_conf}

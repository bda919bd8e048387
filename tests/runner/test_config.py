"""Model configuration and the platform's rules: effective settings, warnings and errors in upstream's words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from xlite_runner.config import CUDAGraphMode, EngineArgs, ModelConfig, ParallelConfig, check_and_update_config
from xlite_runner.errors import ScenarioError, UnsupportedModelError

MODELS = Path(__file__).parents[2] / "examples" / "models"
MOE: dict[str, Any] = json.loads((MODELS / "Qwen3-30B-A3B.json").read_text())
DENSE: dict[str, Any] = json.loads((MODELS / "Qwen3-32B.json").read_text())
LLAMA: dict[str, Any] = {  # published values of Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def args(**settings: Any) -> EngineArgs:
    return EngineArgs.model_validate(settings)


def xlite(full_mode: bool, **settings: Any) -> EngineArgs:
    return args(xlite_graph_config={"enabled": True, "full_mode": full_mode}, **settings)


def test_moe_model() -> None:
    model = ModelConfig.from_hf(MODELS / "Qwen3-30B-A3B.json")
    assert (model.architecture, model.num_hidden_layers, model.head_dim, model.dtype_size) == (
        "Qwen3MoeForCausalLM",
        48,
        128,
        2,
    )
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.num_experts_per_tok, model.moe.norm_topk_prob) == (128, 8, True)
    assert all(model.is_moe_layer(index) for index in range(48))


def test_layers_without_experts() -> None:
    model = ModelConfig.from_hf({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert [index for index in range(8) if model.is_moe_layer(index)] == [3, 5, 7]


def test_llama_derives_head_dim_and_reads_its_rope_scaling() -> None:
    model = ModelConfig.from_hf(LLAMA)
    assert model.head_dim == 128
    assert model.moe is None
    assert not model.attention_bias
    assert model.rope_theta == 500000.0
    assert model.rope_scaling is not None
    assert model.rope_scaling.factor == 8.0


def test_qwen2_has_qkv_biases_that_no_key_announces() -> None:
    model = ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": None})
    assert model.attention_bias
    assert not model.attention_output_bias


def test_rope_parameters_of_newer_files() -> None:
    hf = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    model = ModelConfig.from_hf({**hf, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert model.rope_theta == 1e6
    assert model.rope_scaling is None


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (
            {"type": "yarn", "factor": 4.0},
            4 * 131072,
        ),  # transformers takes max_position_embeddings for the trained length
        ({"rope_type": "linear", "factor": 2.0}, 262144),
        ({"rope_type": "dynamic", "factor": 2.0}, 262144),
        (LLAMA["rope_scaling"], 131072),
        (None, 131072),
    ],
)
def test_longest_sequence_with_scaled_frequencies(scaling: dict[str, Any] | None, expected: int) -> None:
    model = ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling})
    assert model.derived_max_model_len == expected
    assert check_and_update_config(args(), model).scheduler.max_model_len == expected


def test_head_dim_of_the_class() -> None:
    without = {key: value for key, value in DENSE.items() if key != "head_dim"}
    assert ModelConfig.from_hf(without).head_dim == 128
    assert ModelConfig.from_hf({**MOE, "head_dim": 64}).head_dim == 64


@pytest.mark.parametrize(
    ("declared", "expected"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
)
def test_dtype_auto(declared: str, expected: str) -> None:
    assert ModelConfig.from_hf({**LLAMA, "torch_dtype": declared}).dtype == expected


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**MOE, "architectures": ["DeepseekV3ForCausalLM"]}, "config.json: DeepseekV3ForCausalLM not supported! Supp"),
        ({"hidden_size": 1}, "architectures = None: allowed is a list with one of LlamaForCausalLM, Qwen2ForCausalLM"),
        ({k: v for k, v in DENSE.items() if k != "hidden_size"}, 'config.json: missing key "hidden_size"'),
        ({k: v for k, v in MOE.items() if k != "num_experts"}, 'config.json: missing key "num_experts"'),
        ({**DENSE, "hidden_size": "5120"}, "config.json: hidden_size = '5120': Input should be a valid integer"),
        ({**DENSE, "vocab_size": 0}, "config.json: vocab_size = 0: Input should be greater than 0"),
        ({**DENSE, "hidden_act": "gelu"}, "config.json: hidden_act = 'gelu': Input should be 'silu'"),
        ({**DENSE, "num_key_value_heads": 7}, "num_attention_heads (64) must be a multiple of num_key_value_heads (7)"),
        ({**MOE, "num_experts_per_tok": 129}, "num_experts_per_tok (129) must not exceed num_experts (128)"),
        (
            {**DENSE, "rope_scaling": {"rope_type": "longrope"}},
            "rope_type = 'longrope' is not supported; allowed: default, llama3, yarn, linear, dynamic",
        ),
        ({**DENSE, "rope_scaling": {"rope_type": "yarn"}}, 'missing key "factor"'),
        ({**DENSE, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; allowed: 1"),
        ({**MOE, "num_key_value_heads": None}, 'missing key "num_key_value_heads"'),
        (
            {**LLAMA, "hidden_size": 4097},
            "The hidden size (4097) is not a multiple of the number of attention heads (32).",
        ),
        ({**DENSE, "head_dim": None}, "head_dim = None is not supported; allowed: an integer > 0 or no such key"),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLM"], "head_dim": 64}, "head_dim = 64: allowed is 128, as the cla"),
        ({**MOE, "shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 is not supported; all"),
        (
            {**DENSE, "quantization_config": {"quant_method": "fp8"}},
            "quantization_config = {'quant_method': 'fp8'} is not supported; allowed: weights that are not quantized",
        ),
        (
            {**MOE, "num_hidden_layers": 2, "mlp_only_layers": [0, 1]},
            "No Qwen3MoE layer found in the model.layers. mlp",
        ),
        ({**DENSE, "use_sliding_window": True}, "use_sliding_window = True is not supported; allowed: false"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias = True is not supported; allowed: false"),
        ({**LLAMA, "torch_dtype": "int8"}, "dtype = 'int8': Input should be 'bfloat16', 'float16' or 'float32'"),
    ],
)
def test_refused_models(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_hf(hf)
    assert message in str(caught.value)


def test_unreadable_models(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"none\.json: cannot read the model's config\.json: No such file"):
        ModelConfig.from_hf(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    for text, message in (("{", "not a JSON file"), ("[]", "expected a JSON object, found list")):
        broken.write_text(text)
        with pytest.raises(UnsupportedModelError, match=message):
            ModelConfig.from_hf(broken)


def test_defaults_are_those_of_vllm_serve() -> None:
    config = check_and_update_config(args(), ModelConfig.from_hf(DENSE))
    assert config.scheduler.max_num_seqs == 256
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.scheduler.max_model_len == 40960
    assert config.cache.block_size == 128
    assert config.cache.gpu_memory_utilization == 0.92
    assert config.parallel == ParallelConfig()
    assert config.speculative is None


@pytest.mark.parametrize(
    ("settings", "tokens", "seqs"),
    [
        ({"max_model_len": 4}, 1024, 256),
        ({"max_model_len": 4, "max_num_seqs": 2}, 8, 2),
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"enable_chunked_prefill": False}, 40960, 256),
    ],
)
def test_scheduler_defaults(settings: dict[str, Any], tokens: int, seqs: int) -> None:
    scheduler = check_and_update_config(args(**settings), ModelConfig.from_hf(DENSE)).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)


def test_xlite_full_mode_is_eager(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xlite_runner")
    config = check_and_update_config(xlite(True, block_size=128), ModelConfig.from_hf(DENSE))
    assert config.compilation.enforce_eager
    assert config.compilation.cudagraph_mode is CUDAGraphMode.NONE
    assert config.compilation.cudagraph_capture_sizes == ()
    assert config.compilation.max_cudagraph_capture_size == 0
    assert caplog.messages == [
        "Chunked prefill is enabled with max_num_batched_tokens=2048.",
        "ACLGraph has been disabled when speculation is disabled in xlite full mode",
        "Compilation disabled, using eager mode by default",
        "openEuler Xlite enabled. See: https://atomgit.com/openeuler/GVirt/tree/master/xlite",
        "Set PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    ]


@pytest.mark.parametrize("settings", [xlite(False), xlite(True, num_speculative_tokens=1)])
def test_other_xlite_modes_capture_decode_steps(settings: EngineArgs) -> None:
    config = check_and_update_config(settings, ModelConfig.from_hf(DENSE))
    assert config.compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert not config.compilation.enforce_eager


def test_decode_only_mode_with_enforce_eager_captures_nothing() -> None:
    compilation = check_and_update_config(xlite(False, enforce_eager=True), ModelConfig.from_hf(DENSE)).compilation
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.enforce_eager
    assert compilation.cudagraph_capture_sizes == ()


@pytest.mark.parametrize(
    ("settings", "count", "largest"),
    [
        (args(), 35, 256),  # the public quick start of vllm-ascend prints 35 sizes for 256 sequences
        (args(max_num_seqs=64), 11, 64),
        (args(max_num_seqs=5), 3, 4),
        (args(max_num_seqs=300), 37, 288),
        (args(max_num_seqs=96), 15, 96),
        (args(max_num_seqs=20, max_num_batched_tokens=20), 6, 20),
        (args(max_num_seqs=1024), 51, 512),
        (args(max_num_seqs=64, num_speculative_tokens=1), 19, 128),
        (args(max_num_seqs=64, max_num_batched_tokens=64, num_speculative_tokens=1), 11, 64),
    ],
)
def test_capture_sizes(settings: EngineArgs, count: int, largest: int) -> None:
    compilation = check_and_update_config(settings, ModelConfig.from_hf(DENSE)).compilation
    assert len(compilation.cudagraph_capture_sizes) == count
    assert compilation.max_cudagraph_capture_size == largest
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE


def test_enforce_eager_without_xlite() -> None:
    compilation = check_and_update_config(args(enforce_eager=True), ModelConfig.from_hf(DENSE)).compilation
    assert (compilation.cudagraph_mode, compilation.cudagraph_capture_sizes) == (CUDAGraphMode.NONE, ())


NO_CHUNKS = {"enable_chunked_prefill": False, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("settings", "block_size", "messages"),
    [
        (
            xlite(True, block_size=256, **NO_CHUNKS),
            128,
            [
                (
                    "Current cache block size may not be optimal for xlite graph mode. current_block_size=256, "
                    "recommended_block_size=128."
                ),
                (
                    "Setting block size for xlite compatibility. original_block_size=256, new_block_size=128. "
                    "xlite_graph_config requires block_size <= 128."
                ),
            ],
        ),
        (
            xlite(True, block_size=256),
            128,
            [
                (
                    "Current cache block size may not be optimal for xlite graph mode. current_block_size=256, "
                    "recommended_block_size=128."
                ),
                "Block size is set to 128 if prefix cache or chunked prefill is enabled.",
            ],
        ),
        (
            xlite(True, block_size=64, **NO_CHUNKS),
            64,
            [
                (
                    "Current cache block size may not be optimal for xlite graph mode. current_block_size=64, "
                    "recommended_block_size=128."
                )
            ],
        ),
        (args(block_size=256, **NO_CHUNKS), 256, []),
        (args(**NO_CHUNKS), 16, []),
        (args(block_size=64), 128, ["Block size is set to 128 if prefix cache or chunked prefill is enabled."]),
    ],
)
def test_block_size(
    settings: EngineArgs, block_size: int, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xlite_runner")
    assert check_and_update_config(settings, ModelConfig.from_hf(DENSE)).cache.block_size == block_size
    assert [message for message in caplog.messages if "lock" in message] == messages


@pytest.mark.parametrize(
    ("given", "effective"),
    [
        ("page_size:1g", "page_size:1g,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.8"),
    ],
)
def test_expandable_segments_are_the_normal_mode(given: str, effective: str) -> None:
    config = check_and_update_config(args(environment={"PYTORCH_NPU_ALLOC_CONF": given}), ModelConfig.from_hf(DENSE))
    assert config.environment == {"PYTORCH_NPU_ALLOC_CONF": effective}


LAUNCH_BLOCKING = (
    "ACL graph is incompatible with ASCEND_LAUNCH_BLOCKING=1. Please unset ASCEND_LAUNCH_BLOCKING or set it to 0. "
    "If you need ASCEND_LAUNCH_BLOCKING for debugging, consider other methods — for example, check the plog files "
    "(default: $HOME/ascend/log/debug) for more information about runtime errors."
)


@pytest.mark.parametrize(
    ("hf", "settings", "error", "message"),
    [
        (
            DENSE,
            args(tensor_parallel_size=3),
            ValueError,
            "Total number of attention heads (64) must be divisible by tensor parallel size (3).",
        ),
        (
            {**DENSE, "num_attention_heads": 60, "num_key_value_heads": 10},
            args(tensor_parallel_size=4),
            UnsupportedModelError,
            "num_key_value_heads (10) must be a multiple or a divisor of tensor_parallel_size (4)",
        ),
        (
            {**DENSE, "vocab_size": 512, "num_attention_heads": 7, "num_key_value_heads": 1},
            args(tensor_parallel_size=7),
            UnsupportedModelError,
            "vocab_size, padded to 64 times a number, (512) must be a multiple of tensor_parallel_size (7)",
        ),
        (
            DENSE,
            args(environment={"ASCEND_LAUNCH_BLOCKING": "1"}),
            ValueError,
            LAUNCH_BLOCKING,
        ),
        (
            {**DENSE, "intermediate_size": 129},
            args(tensor_parallel_size=2),
            UnsupportedModelError,
            "intermediate_size (129) must be a multiple of tensor_parallel_size (2)",
        ),
        (
            DENSE,
            args(enable_expert_parallel=True),
            ValueError,
            "Number of experts in the model must be greater than 0 when expert parallelism is enabled.",
        ),
        (
            {**MOE, "moe_intermediate_size": 6},
            args(tensor_parallel_size=2, data_parallel_size=2),
            UnsupportedModelError,
            "moe_intermediate_size (6) must be a multiple of tensor_parallel_size * data_parallel_size (4)",
        ),
        (
            {**MOE, "num_experts": 8},
            args(tensor_parallel_size=16, enable_expert_parallel=True),
            ValueError,
            "Tensor parallel size 16 is greater than the number of experts 8.",
        ),
        (
            {**MOE, "num_experts": 100},
            args(tensor_parallel_size=8, enable_expert_parallel=True),
            UnsupportedModelError,
            "num_experts (100) must be a multiple of expert parallel size (8)",
        ),
        (
            DENSE,
            xlite(True, pipeline_parallel_size=2),
            RuntimeError,
            "Xlite graph mode is not compatible with pipeline parallelism. Please set pipeline_parallel_size to 1.",
        ),
        (
            DENSE,
            args(pipeline_parallel_size=2),
            ScenarioError,
            "pipeline_parallel_size = 2 is not supported; allowed: 1",
        ),
        (
            DENSE,
            xlite(True, num_speculative_tokens=2),
            RuntimeError,
            "Xlite graph mode only support speculative decoding with num_speculative_tokens=1.",
        ),
        (
            DENSE,
            args(max_num_batched_tokens=4, max_num_seqs=128),
            ValueError,
            "max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (128).",
        ),
        (
            DENSE,
            args(max_num_batched_tokens=1024, max_model_len=2048, enable_chunked_prefill=False),
            ValueError,
            (
                "max_num_batched_tokens (1024) is smaller than max_model_len (2048). This effectively limits the "
                "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. "
                "Please increase max_num_batched_tokens or decrease max_model_len."
            ),
        ),
        (
            DENSE,
            args(max_model_len=40961),
            ValueError,
            (
                "User-specified max_model_len (40961) is greater than the derived max_model_len "
                "(max_position_embeddings=40960.0 or model_max_length=None in model's config.json). To allow "
                "overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. "
                "VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. "
                "If the model uses relative position encoding (RoPE), positions exceeding "
                "derived_max_model_len lead to nan. If the model uses absolute position encoding, positions exceeding "
                "derived_max_model_len will cause a CUDA array out-of-bounds error."
            ),
        ),
    ],
)
def test_refused_settings(hf: dict[str, Any], settings: EngineArgs, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        check_and_update_config(settings, ModelConfig.from_hf(hf))
    assert str(caught.value) == message


def test_longer_than_the_model_with_the_switch(caplog: pytest.LogCaptureFixture) -> None:
    settings = args(max_model_len=50000, environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert check_and_update_config(settings, ModelConfig.from_hf(DENSE)).scheduler.max_model_len == 50000
    assert "must be used with extreme caution" in caplog.text


def test_more_tokens_than_requests_can_have_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_and_update_config(
        args(max_num_batched_tokens=4096, max_num_seqs=2, max_model_len=1024), ModelConfig.from_hf(DENSE)
    )
    assert "max_num_batched_tokens (4096) exceeds max_num_seqs * max_model_len (2048)." in caplog.text


@pytest.mark.parametrize(("tp_size", "num_kv_heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_kv_heads_are_split_then_replicated(tp_size: int, num_kv_heads: int) -> None:
    config = check_and_update_config(
        args(tensor_parallel_size=tp_size, enable_expert_parallel=True), ModelConfig.from_hf(MOE)
    )
    assert config.model.get_num_kv_heads(config.parallel) == num_kv_heads
    assert config.model.get_num_attention_heads(config.parallel) == 32 // tp_size


@pytest.mark.parametrize(("expert_parallel", "ep_size", "tp_size"), [(True, 4, 1), (False, 1, 4)])
def test_experts_are_spread_or_split(expert_parallel: bool, ep_size: int, tp_size: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=expert_parallel)
    assert (parallel.moe_ep_size, parallel.moe_tp_size) == (ep_size, tp_size)
    assert (parallel.world_size, parallel.world_size_across_dp) == (2, 4)


@pytest.mark.parametrize(("model", "in_common", "independent"), [(DENSE, 1, 2), (MOE, 2, 1)])
def test_replicas_of_a_dense_model_know_nothing_of_each_other(model, in_common, independent) -> None:
    given = args(tensor_parallel_size=2, data_parallel_size=2)
    parallel = check_and_update_config(given, ModelConfig.from_hf(model)).parallel
    assert (parallel.data_parallel_size, parallel.num_independent_replicas) == (in_common, independent)
    assert (parallel.num_replicas, parallel.num_ranks) == (2, 4)


@pytest.mark.parametrize(("given", "effective"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtype_setting(given: str, effective: str) -> None:
    assert check_and_update_config(args(dtype=given), ModelConfig.from_hf(DENSE)).model.dtype == effective


def test_truncated_capture_size_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_and_update_config(args(max_num_seqs=300, block_size=128), ModelConfig.from_hf(DENSE))
    assert caplog.messages == ["Truncating max_cudagraph_capture_size to 288"]

"""Random start-ups and requests, which upstream and xlite_runner must agree on like on those of ``cases.py``.

Most are valid; now and then something is not, and then both must refuse it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.upstream.cases import DECODE_ONLY, FULL, OFF, ServingCase

MIB, GIB = 1 << 20, 1 << 30
DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOE = "Qwen3MoeForCausalLM"
SEEDS = (8, 11, 13, 21, 36, 38, 195)
"""A few that start, for every day; in 195 experts are kept in FRACTAL_NZ."""
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class Dice(random.Random):
    """Random choices in the words of this module."""

    def one_in(self, n: float) -> bool:
        """Whether something that happens once in n times happens."""
        return self.random() < 1 / n


def random_case(seed: int, folder: Path) -> ServingCase:
    """The case of a seed; one without prompts is a start-up only.

    Args:
        seed: Chooses everything.
        folder: Where the model's ``config.json`` is written to.
    """
    dice = Dice(seed)
    hf = random_model(dice)
    settings = random_settings(dice, hf)
    rank = dice.randrange(settings["tensor_parallel_size"]) if dice.one_in(4) else 0
    for process in settings.get("other_processes", ()):
        if "rank" in process:  # upstream's rank knows nothing of those with less memory
            process["rank"] = rank
    prompts, each = random_requests(dice, hf, settings)
    path = folder / f"random-{seed}.json"
    path.write_text(json.dumps(hf, indent=2), encoding="utf-8")
    return ServingCase(
        f"random {seed}",
        {"model": path, **settings},
        rank=rank,
        prompts=prompts,
        each=each,
    )


def random_model(dice: Dice) -> dict[str, Any]:
    """A ``config.json``."""
    architecture = dice.choice([*DENSE, MOE, MOE])
    num_kv_heads = dice.choice([1, 1, 2, 2, 4, 4, 8])
    num_heads = num_kv_heads * dice.choice([1, 1, 2, 2, 3, 4, 7, 8])
    hf: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "hidden_size": dice.choice([64, 128, 256, 512, 896, 1024, 2048, 4096, 5120, 16 * dice.randint(4, 100)]),
        "intermediate_size": dice.choice([128, 256, 1536, 4864, 11008, 14336, 16 * dice.randint(4, 200)]),
        "max_position_embeddings": dice.choice([512, 2048, 4096, 32768, 40960, 131072]),
        "num_attention_heads": num_heads,
        "num_hidden_layers": dice.choice([1, 2, 2, 3, 3, 4, 5, 8]),
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": dice.choice([1e-5, 1e-6]),
        "tie_word_embeddings": dice.one_in(3),
        "vocab_size": dice.choice([512, 1000, 2048, 32000, 32064, 50257, 128256, 151936, dice.randint(300, 70000)]),
    }
    hf |= _head_dim(dice, hf) | _rope(dice) | _dtype(dice)
    if architecture == MOE:
        hf |= _experts(dice)
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", MOE) and dice.one_in(3):
        hf["attention_bias"] = dice.one_in(2)
    hf |= _unusual(dice, architecture)
    return hf


def _head_dim(dice: Dice, hf: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = dice.choice([32, 64, 64, 80, 96, 128, 128, 128, 192, 256])
    if hf["architectures"][0] not in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
        return {"head_dim": head_dim} if not dice.one_in(25) else dice.choice([{}, {"head_dim": None}])
    if dice.one_in(4):
        return {"head_dim": head_dim}
    # These classes derive it.
    given = dice.choice([{}, {}, {"head_dim": None}, {"head_dim": head_dim}])
    return {"hidden_size": hf["num_attention_heads"] * head_dim, **given}


def _rope(dice: Dice) -> dict[str, Any]:
    theta = {"rope_theta": dice.choice([10000.0, 500000.0, 1000000.0, 1000000, 5000000])}
    kind = dice.choice(["default"] * 12 + ["missing", "null", "llama3", "parameters", "yarn", "linear", "dynamic"])
    if kind == "missing":
        return {}
    if kind == "null":
        return theta | {"rope_scaling": None}
    if kind == "parameters":
        return {"rope_parameters": theta | {"rope_type": "default"}}
    if kind == "llama3":
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return theta | {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 512} | factors}
    if kind == "yarn":
        more = {"original_max_position_embeddings": dice.choice([256, 512, 4096])}
        return theta | {"rope_scaling": {dice.choice(["type", "rope_type"]): "yarn", "factor": 4.0} | more}
    if kind in ("linear", "dynamic"):
        return theta | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
    return theta


def _dtype(dice: Dice) -> dict[str, Any]:
    name = dice.choice(["torch_dtype", "torch_dtype", "dtype"])
    kind = dice.choice(["bfloat16"] * 8 + ["float16", "float16", "float32", "missing"])
    return {} if kind == "missing" else {name: kind}


def _experts(dice: Dice) -> dict[str, Any]:
    num_experts = dice.choice([4, 8, 16, 16, 32, 64, 128, dice.randint(2, 40)])
    experts: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": min(num_experts, dice.choice([1, 2, 4, 4, 8, dice.randint(1, 10)])),
        "moe_intermediate_size": dice.choice([64, 128, 128, 256, 512, 768, 16 * dice.randint(2, 60)]),
    }
    if not dice.one_in(5):
        experts["norm_topk_prob"] = not dice.one_in(4)
    if dice.one_in(2):
        experts["decoder_sparse_step"] = dice.choice([1, 1, 1, 2])
    if dice.one_in(2):
        experts["mlp_only_layers"] = dice.choice([[], [], [0], [0, 1]])
    return experts


def _unusual(dice: Dice, architecture: str) -> dict[str, Any]:
    """What few models have; some of it is refused."""
    if not dice.one_in(10):
        return {}
    options: list[dict[str, Any]] = [
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        },
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
        {"quantization_config": {"quant_method": "no such method"}},
        {"quantization_config": None},
        {"hidden_act": dice.choice(["gelu", "relu", "swish"])},
        {"mlp_bias": True} if architecture == "LlamaForCausalLM" else {"shared_expert_intermediate_size": 128},
        {"num_attention_heads": 7, "num_key_value_heads": 3},
        {"num_key_value_heads": None},
        {"intermediate_size": dice.choice([100, 102, 31, 1001])},
        {"hidden_size": dice.choice([72, 100, 1000])},
        {"architectures": [dice.choice(["MistralForCausalLM", "Qwen2MoeForCausalLM", "GPT2LMHeadModel", "NoSuch"])]},
        {"architectures": []},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "use_cache": True, "attention_dropout": 0.0},
        {"partial_rotary_factor": 0.5},
        {"pretraining_tp": 1, "initializer_range": 0.02, "transformers_version": "4.51.0"},
    ]
    return dice.choice(options)


def random_settings(dice: Dice, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Engine and device."""
    is_moe = "num_experts" in hf
    sizes = [1, 1, 1, 2, 2, 2, 2, 4, 4, 8, 16, 3, 7]
    fitting = [size for size in sizes if (hf["num_attention_heads"] or 1) % size == 0]
    tp_size = dice.choice(sizes if dice.one_in(20) else fitting)
    settings: dict[str, Any] = {
        "device_profile": dice.choice(["a3-64g"] * 5 + ["a2-64g"] * 3 + ["a2-32g"])
        if not dice.one_in(40)
        else "310p-44g",
        "tensor_parallel_size": tp_size,
        "enable_expert_parallel": dice.one_in(2) if is_moe else dice.one_in(40),
        "xlite_graph_config": dice.choice([FULL, FULL, FULL, DECODE_ONLY, OFF]),
        "enforce_eager": dice.one_in(2),
        "gpu_memory_utilization": dice.choice([0.9, 0.92, 0.95, 0.1, 0.5, 0.05, round(dice.uniform(0.02, 1.0), 3)]),
        "seed": dice.choice([0, 0, 0, 1, 42, 1234567]),
        "dtype": dice.choice(["auto"] * 6 + ["bfloat16", "float16", "half", "float32", "float"]),
        "block_size": dice.choice([None, 128, 128, 128, 16, 64, dice.choice([1, 32, 48, 100, 256])]),
        "environment": _environment(dice),
    }
    settings |= _lengths(dice, hf)
    if dice.one_in(8):
        settings["kv_cache_memory_bytes"] = dice.choice([GIB, 4 * GIB, 100 * MIB + 12345, dice.randint(MIB, 8 * GIB)])
    if dice.one_in(8):
        settings["num_gpu_blocks_override"] = dice.choice([16, 64, 1000, dice.randint(1, 300)])
    if dice.one_in(8):
        bound = {"rank": 0} if dice.one_in(2) else {}
        size = dice.choice([GIB, 3 * GIB, 123456789, dice.randint(MIB, 20 * GIB)])
        settings["other_processes"] = [{"name": "neighbour", "memory_bytes": size, **bound}]
    if dice.one_in(10):
        settings["free_memory_bytes"] = dice.randint(10 * GIB, 28 * GIB) // 4096 * 4096
    return settings


def _lengths(dice: Dice, hf: Mapping[str, Any]) -> dict[str, Any]:
    longest = int(hf["max_position_embeddings"])
    max_model_len = dice.choice([None, longest, min(longest, 2048), min(longest, 4096), dice.randint(64, longest)])
    max_num_seqs = dice.choice([None, 1, 2, 8, 16, 32, 64, 128, 256, dice.randint(1, 300)])
    tokens = dice.choice([None, 256, 512, 1024, 2048, 4096, 8192, 16384, dice.randint(1, 9000)])
    if tokens is not None and max_num_seqs is not None and tokens < max_num_seqs and not dice.one_in(10):
        tokens = max_num_seqs
    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": tokens,
        "enable_prefix_caching": not dice.one_in(4),
        "enable_chunked_prefill": not dice.one_in(6),
    }
    if not settings["enable_chunked_prefill"] and tokens is not None and not dice.one_in(5):
        settings["max_num_batched_tokens"] = max(tokens, max_model_len or longest)
    if dice.one_in(40):
        settings["max_model_len"] = longest + dice.randint(1, 1000)
    return settings


ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "HCCL_BUFFSIZE": ("1", "100", "200", "400", "512", "1024", "2048"),
    "PYTORCH_NPU_ALLOC_CONF": (
        "expandable_segments:True",
        "expandable_segments:False",
        "max_split_size_mb:256",
        "garbage_collection_threshold:0.8",
        "expandable_segments:True,garbage_collection_threshold:0.6",
        "roundup_power2_divisions:4",
        "base_addr_aligned_kb:0",
    ),
    "VLLM_ASCEND_ENABLE_NZ": ("0", "1", "2"),
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": ("0", "1"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": ("0", "1"),
    "TASK_QUEUE_ENABLE": ("0", "1", "2"),
    "HCCL_OP_EXPANSION_MODE": ("AIV", "AI_CPU"),
    "HCCL_DETERMINISTIC": ("true", "false"),
    "ASCEND_LAUNCH_BLOCKING": ("0", "1"),
    "XLITE_ACTIVE_TOKENS_RATIO_PER_EP": ("0.5", "1.5", "2"),
    "XLITE_COMM_OPTIMIZE_LEN": ("0", "128", "4096"),
    "XLITE_DEVS_PER_NODE": ("8", "16"),
    "XLITE_DISABLE_XCCL": ("0", "1"),
    "XLITE_ENABLE_GRAPH_COMM": ("0", "1"),
    "XLITE_MOE_ALLTOALL": ("0", "1"),
}


def _environment(dice: Dice) -> dict[str, str]:
    if dice.one_in(2):
        return {}
    names = dice.sample(list(ENVIRONMENT), dice.choice([1, 1, 1, 2, 3]))
    return {name: dice.choice(ENVIRONMENT[name]) for name in names}


def random_requests(
    dice: Dice, hf: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[tuple[range, ...], tuple[dict[str, Any], ...]]:
    """Prompts, and the sampling of each; none in a good part of the cases, which are cheaper then."""
    if not dice.one_in(2):
        return (), ()
    longest = settings["max_model_len"] or hf["max_position_embeddings"]
    at_once = min(settings["max_num_seqs"] or 256, 64)
    count = dice.choice([1, 2, 3, dice.randint(1, 8), at_once, dice.randint(1, at_once)])
    lengths = [dice.randint(1, max(1, min(longest - 8, dice.choice([8, 100, 1000, 3000])))) for _ in range(count)]
    starts = [dice.randrange(hf["vocab_size"]) for _ in lengths]
    prompts = tuple(
        range(start - min(length, start), start - min(length, start) + min(length, hf["vocab_size"]))
        for start, length in zip(starts, lengths, strict=True)
    )
    same = random_sampling(dice, hf["vocab_size"])
    is_mixed = dice.one_in(3)
    return prompts, tuple(random_sampling(dice, hf["vocab_size"]) if is_mixed else same for _ in prompts)


def random_sampling(dice: Dice, vocab_size: int) -> dict[str, Any]:
    """Settings of one request."""
    params: dict[str, Any] = {"max_tokens": dice.choice([1, 2, 3, 3, 4])}
    kind = dice.choice(["greedy", "greedy", "random", "random", "temperature"])
    if kind == "greedy":
        params["temperature"] = 0.0
    elif kind == "temperature":
        params["temperature"] = dice.choice([0.5, 0.7, 0.001, 0.000001, 2.0])
    options: dict[str, tuple[Any, ...]] = {
        "top_p": (0.9, 0.5, 1.0),
        "top_k": (1, 20, 50, -1, vocab_size + 5),
        "min_p": (0.05, 0.1),
        "presence_penalty": (0.5, -1.0),
        "frequency_penalty": (0.5, 2.0),
        "repetition_penalty": (1.1, 0.8),
        "logprobs": (0, 1, 5, 20, -1),
        "seed": (0, 7, 123456),
        "min_tokens": (1, params["max_tokens"]),
        "stop_token_ids": ((1,), (2, 3)),
        "allowed_token_ids": ((1,), tuple(range(5, 50))),
        "prompt_logprobs": (0, 1, 5),
    }
    for name in dice.sample(list(options), dice.choice([0, 0, 1, 1, 2, 3])):
        params[name] = dice.choice(options[name])
    return params

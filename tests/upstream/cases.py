"""Scenarios that upstream and xlite_runner must agree on, to the byte: a scenario file, and what replaces settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = Path(__file__).parent / "models"
PENALTIES_WITHOUT_TRITON_BYTES = 4096
"""xlite_runner applies penalties by torch's operators, which keep small temporaries that a Triton kernel does not."""
RELEASES = ("0.22.1", "0.23.0")
"""Releases of vllm that the suite is about; what else is installed is tried by ``test_other_releases.py``."""
ON_ANY_RELEASE = ("tiny dense", "tiny MoE, EP 2", "seed, rank 0", "tiny dense, greedy", "seed, greedy")
"""Cases that are run on other releases, too."""


def has_the_fix(release: str) -> bool:
    """Whether a release, of vllm or of vllm-ascend, has PR #11380; 0.29.0rc1 runs the model again."""
    return (0, 23) <= tuple(map(int, release.split(".")[:2])) < (0, 29)


@dataclass(frozen=True)
class Case:
    """One start-up.

    Attributes:
        name: What is special about it.
        settings: Scenario keys that replace those of the file.
        scenario: The file.
        rank: The rank that runs upstream's code.
        all_ranks: Whether all do instead, in processes of their own.
        releases: Releases of upstream that it runs on.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    scenario: Path = EXAMPLES / "tiny.toml"
    rank: int = 0
    all_ranks: bool = False
    releases: tuple[str, ...] = RELEASES

    def __str__(self) -> str:
        return self.name

    def runs_on(self, release: str) -> bool:
        """Whether it is run on a release; on one that nobody fitted the double to, few are."""
        return release in self.releases if release in RELEASES else self.name in ON_ANY_RELEASE


@dataclass(frozen=True)
class ServingCase(Case):
    """A start-up, and requests that are served after it.

    Attributes:
        prompts: Token ids of each request's prompt.
        sampling: Settings of upstream's ``SamplingParams``, the same for all requests.
        each: Settings of each request's beyond those.
        engine_args: Settings of upstream's engine that a scenario does not have.
        values: Of the world.
        replicas: Number of the replica that serves each request. Default: the first one serves all.
    """

    prompts: tuple[Sequence[int], ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    each: tuple[dict[str, Any], ...] = ()
    engine_args: dict[str, Any] = field(default_factory=dict)
    values: Literal["shape", "real"] = "shape"
    replicas: tuple[int, ...] = ()

    def replica_of(self, request: int) -> int:
        """The replica that serves a request."""
        return self.replicas[request] if self.replicas else 0

    @property
    def requests(self) -> list[tuple[Sequence[int], dict[str, Any]]]:
        """Prompt and sampling of each request."""
        each = self.each or ({},) * len(self.prompts)
        return [(prompt, self.sampling | own) for prompt, own in zip(self.prompts, each, strict=True)]


SEED = EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml"
FULL = {"enabled": True, "full_mode": True}
DECODE_ONLY = {"enabled": True, "full_mode": False}
OFF = {"enabled": False, "full_mode": False}
ESTIMATE = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": 1}
"""0.22.1 does so by default."""
TINY_MOE = {
    "model": MODELS / "tiny-qwen3-moe.json",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.1,
}
MTP = {"model": MODELS / "tiny-mimo.json", "num_speculative_tokens": 1}
"""A Qwen2 with MiMo's module for draft tokens."""


def dense(model: str, tp_size: int, **settings: Any) -> dict[str, Any]:
    """A published dense model on dies of an A3."""
    return {
        "model": MODELS / f"{model}.json",
        "tensor_parallel_size": tp_size,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.9,
    } | settings


WHOLE_PROMPTS = {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 512}
REFUSED = {
    "No common block size for 64. ": Case(
        "tiny dense, blocks of 64",
        {"block_size": 64} | WHOLE_PROMPTS,
    ),
    "(1.0/61.27 GiB) on startup is less than desired GPU memory utilization (0.05, 3.06 GiB).": Case(
        "tiny dense, hardly anything free", {"free_memory_bytes": 1 << 30}
    ),
    "No available memory for the cache blocks.": Case("tiny dense, nothing left", {"gpu_memory_utilization": 0.0005}),
}
"""Start-ups that both refuse, by what the error says."""
NO_DRAFTS = Case("tiny MTP, refused", MTP, releases=("0.22.1",))
"""What the earlier release does not have: drafts with xlite."""

CASES = (
    Case("seed, rank 0", scenario=SEED),
    Case("seed, rank 1", {}, SEED, rank=1, releases=("0.22.1",)),
    Case(
        "seed on A2",
        {"device_profile": "a2-64g", "total_memory_bytes": 65452113920, "free_memory_bytes": 65043169280},
        SEED,
        releases=("0.22.1",),
    ),
    Case(
        "seed, decode-only eager",
        {"xlite_graph_config": DECODE_ONLY, "enforce_eager": True},
        SEED,
        releases=("0.23.0",),
    ),
    Case(
        "seed, xlite off, eager, experts not spread",
        {"xlite_graph_config": OFF, "enforce_eager": True, "enable_expert_parallel": False},
        SEED,
        releases=("0.23.0",),
    ),
    Case("Qwen3-32B on 8 cards of an A2", scenario=EXAMPLES / "qwen3-32b-tp8-dense.toml", releases=("0.22.1",)),
    Case("tiny dense"),
    Case("tiny dense, TP 2", {"tensor_parallel_size": 2}),
    Case("tiny dense, TP 4, more ranks than key heads", {"tensor_parallel_size": 4}),
    Case("tiny dense, decode-only eager", {"xlite_graph_config": DECODE_ONLY, "enforce_eager": True}),
    Case("tiny dense, xlite off, eager", {"xlite_graph_config": OFF, "enforce_eager": True}),
    Case("tiny dense, decode-only", {"xlite_graph_config": DECODE_ONLY}, releases=("0.23.0",)),
    Case(
        "tiny dense, decode-only, graphs estimated",
        {"xlite_graph_config": DECODE_ONLY, "environment": ESTIMATE},
        releases=("0.22.1",),
    ),
    Case("tiny dense, xlite off", {"xlite_graph_config": OFF}, releases=("0.23.0",)),
    Case("tiny dense, utilization 0.5", {"gpu_memory_utilization": 0.5}),
    Case("tiny dense, utilization 0.92, length 128", {"gpu_memory_utilization": 0.92, "max_model_len": 128}),
    Case("tiny dense, float16", {"dtype": "float16"}),
    Case("tiny dense, one sequence", {"max_num_seqs": 1}),
    Case("tiny dense, 256 sequences", {"max_num_seqs": 256}),
    Case("tiny dense, 2048 tokens", {"max_num_batched_tokens": 2048}),
    Case("tiny dense, size of the cache given", {"kv_cache_memory_bytes": 1 << 30}),
    Case("tiny dense, neighbour", {"other_processes": [{"name": "neighbour", "memory_bytes": 3 << 30}]}),
    Case(
        "tiny dense, no prefix cache, whole prompts",
        WHOLE_PROMPTS,
    ),
    Case("tiny dense, YaRN", {"model": MODELS / "tiny-qwen3-yarn.json"}),
    Case("tiny MoE", TINY_MOE),
    Case("tiny MoE, TP 2", TINY_MOE | {"tensor_parallel_size": 2}),
    Case("tiny MoE, EP 2", TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    Case("tiny MoE, EP 4, rank 3", TINY_MOE | {"tensor_parallel_size": 4, "enable_expert_parallel": True}, rank=3),
    Case("tiny MoE, EP 8", TINY_MOE | {"tensor_parallel_size": 8, "enable_expert_parallel": True}),
    Case(
        "tiny MoE, EP 2, decode-only eager",
        TINY_MOE
        | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        | {"xlite_graph_config": DECODE_ONLY, "enforce_eager": True},
    ),
    Case(
        "tiny MoE, EP 2, xlite off, eager",
        TINY_MOE
        | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        | {"xlite_graph_config": OFF, "enforce_eager": True},
    ),
    Case(
        "tiny MoE, EP 2, decode-only",
        TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "xlite_graph_config": DECODE_ONLY},
        releases=("0.23.0",),
    ),
    Case(
        "tiny MoE, EP 2, xlite off",
        TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "xlite_graph_config": OFF},
        releases=("0.23.0",),
    ),
    Case(
        "tiny MoE, xlite off, on A2",
        TINY_MOE | {"tensor_parallel_size": 2, "device_profile": "a2-64g", "xlite_graph_config": OFF},
        releases=("0.23.0",),
    ),
    Case(
        "tiny MoE, EP 2 on A2",
        TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "device_profile": "a2-64g"},
    ),
    Case("tiny MoE, EP 2, seed 7", TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True, "seed": 7}),
    Case("tiny MTP", MTP, releases=("0.23.0",)),
    Case("tiny MTP, TP 2", MTP | {"tensor_parallel_size": 2}, releases=("0.23.0",)),
    Case("tiny MTP, decode-only", MTP | {"xlite_graph_config": DECODE_ONLY}, releases=("0.23.0",)),
    Case(
        "tiny MTP, decode-only eager",
        MTP | {"xlite_graph_config": DECODE_ONLY, "enforce_eager": True},
        releases=("0.23.0",),
    ),
    Case("tiny MTP, xlite off", MTP | {"xlite_graph_config": OFF}, releases=("0.23.0",)),
    Case("tiny MTP, xlite off, eager", MTP | {"xlite_graph_config": OFF, "enforce_eager": True}),
    Case("Qwen3-0.6B", dense("Qwen3-0.6B", 1)),
    Case("Qwen3-8B, TP 4", dense("Qwen3-8B", 4)),
    Case("Llama-3.1-8B", dense("Llama-3.1-8B", 1)),
    Case("Llama-3.1-8B, TP 2", dense("Llama-3.1-8B", 2), releases=("0.22.1",)),
    Case("Qwen2.5-7B, TP 2", dense("Qwen2.5-7B-Instruct", 2)),
)


def on_all_ranks(name: str, settings: dict[str, Any], **more: Any) -> Case:
    """A start-up in which every rank runs upstream's code."""
    return Case(name, settings, all_ranks=True, **more)


DP_2 = {"data_parallel_size": 2, "enable_expert_parallel": True}
A3_DIE_BYTES = 65787658240
UNEQUAL_PAIR = {"total_memory_bytes": [A3_DIE_BYTES, A3_DIE_BYTES - (2 << 30)]}
UNEQUAL = {"total_memory_bytes": [A3_DIE_BYTES - (gib << 30) for gib in (1, 2, 0, 3)]}
TP_2 = {"tensor_parallel_size": 2}
RANKS = (
    on_all_ranks("ranks: tiny dense, TP 2, DP 2", TP_2 | UNEQUAL | {"data_parallel_size": 2}),
    on_all_ranks("ranks: tiny MoE, DP 2", TINY_MOE | DP_2 | UNEQUAL_PAIR, releases=("0.23.0",)),
    on_all_ranks("ranks: tiny MoE, TP 2, DP 2", TINY_MOE | DP_2 | TP_2 | UNEQUAL),
)
"""Start-ups in which every rank runs upstream's code."""


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "top-p": {"top_p": 0.9},
    "top-p, logprobs": {"top_p": 0.9, "logprobs": 5},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": 0.5},
}
OWN_WAYS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.5, "min_p": 0.1},
    {"temperature": 1e-6},
    {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": (5, 6)},
    {"logprobs": -1},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "seed": 7, "min_p": 0.1},
    {"seed": 7, "logprobs": 2},
)
"""Each request is sampled otherwise: greedy with filters, a temperature that counts as 0.01, ..."""


def prompts(*lengths: int) -> tuple[range, ...]:
    """Prompts of these lengths, of which no two begin with the same token."""
    return tuple(range(100 + i, 100 + i + length) for i, length in enumerate(lengths))


def served(name: str, settings: dict[str, Any], lengths: Sequence[int], sampling: str, **more: Any) -> ServingCase:
    """Requests of some lengths that get three tokens each; on the release whose sampler xlite_runner imitates."""
    params = SAMPLING[sampling] | {"max_tokens": 6 if "num_speculative_tokens" in settings else 3}
    given = {"releases": ("0.23.0",)} | more
    return ServingCase(f"{name}, {sampling}", settings, prompts=prompts(*lengths), sampling=params, **given)


CHUNKS = (7, 400, 30)
"""Lengths of which one needs two steps of 256 tokens."""
PADDED = {"xlite_graph_config": OFF, "max_num_seqs": 64}
"""Steps with prompts are smaller than the largest graph, and padded."""
DRAFTED = (*CHUNKS, 30, 30, 30, 30, 30)
"""Lengths of eight prompts, the most that decode at once: verifying their drafts then takes more than attention."""
SHORT = (3, 5, 4)
"""Lengths that fit what MC2 dispatches together: other ways to dispatch tokens read routing that nobody computed."""
DECODE_ONLY_EAGER = {"xlite_graph_config": DECODE_ONLY, "enforce_eager": True}
OFF_EAGER = {"xlite_graph_config": OFF, "enforce_eager": True}
EP_2 = TINY_MOE | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
REAL: dict[str, Any] = {"values": "real", "releases": RELEASES}
REAL_LATER: dict[str, Any] = {"values": "real"}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1}}
"""Drafts are what followed a token the last time that it occurred in its request."""
FEW_BLOCKS = {"num_gpu_blocks_override": 16}
"""Where a cache has values it takes host memory."""
SERVING = (
    served("seed", {}, [100] * 64, "greedy", scenario=SEED, releases=RELEASES),
    *(served("seed", {}, [100] * 64, sampling, scenario=SEED) for sampling in SAMPLING if sampling != "greedy"),
    *(served("tiny dense", {}, CHUNKS, sampling) for sampling in SAMPLING),
    served("tiny dense, TP 2", {"tensor_parallel_size": 2}, CHUNKS, "top-p"),
    served("tiny dense, decode-only eager", DECODE_ONLY_EAGER, CHUNKS, "top-p"),
    served("tiny dense, xlite off, eager", OFF_EAGER, CHUNKS, "top-p"),
    served("tiny dense, decode-only", {"xlite_graph_config": DECODE_ONLY}, CHUNKS, "greedy"),
    served("tiny dense, xlite off", {"xlite_graph_config": OFF}, CHUNKS, "greedy"),
    served("tiny dense, xlite off, prompts padded", PADDED, SHORT, "greedy"),
    served("tiny dense, each its own way", {}, [9] * len(OWN_WAYS), "greedy, penalties", each=OWN_WAYS),
    served("tiny MoE, EP 2", EP_2, CHUNKS, "top-p"),
    served("tiny MoE, EP 2, decode-only eager", EP_2 | DECODE_ONLY_EAGER, SHORT, "greedy"),
    *(served("tiny MTP", MTP, DRAFTED, sampling) for sampling in SAMPLING),
    served("tiny MTP, TP 2", MTP | {"tensor_parallel_size": 2}, DRAFTED, "top-p"),
    served("tiny MTP, decode-only", MTP | {"xlite_graph_config": DECODE_ONLY}, CHUNKS, "random"),
    served("tiny MTP, decode-only eager", MTP | DECODE_ONLY_EAGER, CHUNKS, "greedy"),
    served("tiny MTP, xlite off", MTP | {"xlite_graph_config": OFF}, DRAFTED, "greedy"),
    served("tiny MTP, xlite off, eager", MTP | OFF_EAGER, DRAFTED, "top-p"),
    served("real tiny dense", FEW_BLOCKS, CHUNKS, "greedy", **REAL),
    served("real tiny dense, decode-only eager", FEW_BLOCKS | DECODE_ONLY_EAGER, CHUNKS, "greedy", **REAL),
    served("real tiny dense, xlite off, eager", FEW_BLOCKS | OFF_EAGER, CHUNKS, "greedy", **REAL),
    served("real tiny dense, ngram", FEW_BLOCKS, CHUNKS, "greedy", engine_args=NGRAM, **REAL_LATER),
    served("real tiny MTP", FEW_BLOCKS | MTP, CHUNKS, "greedy", **REAL_LATER),
    served("real tiny MTP, decode-only eager", FEW_BLOCKS | MTP | DECODE_ONLY_EAGER, CHUNKS, "greedy", **REAL_LATER),
    served("real tiny MoE", FEW_BLOCKS | TINY_MOE, CHUNKS, "greedy", **REAL),
    served("real tiny MoE, xlite off, eager", FEW_BLOCKS | TINY_MOE | OFF_EAGER, CHUNKS, "greedy", **REAL),
)
BY_RANKS: dict[str, Any] = {"all_ranks": True}
ONE_AND_TWO: dict[str, Any] = {"replicas": (0, 1, 1), **BY_RANKS}
GRAPHS = {"xlite_graph_config": DECODE_ONLY}
SERVED_BY_RANKS = (
    served("ranks: tiny MoE, DP 2, one idle", TINY_MOE | DP_2, CHUNKS, "top-p", **BY_RANKS),
    served("ranks: tiny MoE, TP 2, DP 2", TINY_MOE | DP_2 | TP_2, CHUNKS, "random", **ONE_AND_TWO),
    served("ranks: tiny MoE, DP 2, decode-only", TINY_MOE | DP_2 | GRAPHS, SHORT, "greedy", **ONE_AND_TWO),
    served("ranks: tiny dense, DP 2", {"data_parallel_size": 2}, CHUNKS, "top-p", **ONE_AND_TWO),
    served("ranks: real tiny dense, TP 2", FEW_BLOCKS | TP_2, CHUNKS, "greedy", **REAL, **BY_RANKS),
    served(
        "ranks: real tiny MoE, EP 2, xlite off, eager",
        FEW_BLOCKS | EP_2 | OFF_EAGER,
        CHUNKS,
        "greedy",
        values="real",
        **BY_RANKS,
    ),
)
"""Requests that every rank's process serves; in ``replicas`` those of each replica."""


def audit_of(example: str, **settings: Any) -> Case:
    """A scenario of ``examples/audit``, on the release whose sampler xlite_runner imitates."""
    return Case(example, settings, EXAMPLES / "audit" / f"{example}.toml", releases=("0.23.0",))


EVERY_FEATURE = {
    "sampling": [
        "temperature", "top_p", "top_k", "min_p", "penalties", "logprobs", "seed", "allowed_token_ids",
        "prompt_logprobs",
    ]
}  # fmt: skip
AUDITS = (
    audit_of("01-seed"),
    replace(audit_of("06-xccl-off", audit={"sampling": []}), name="06-xccl-off, greedy"),
    Case("tiny dense, every feature", {"audit": EVERY_FEATURE}, releases=("0.23.0",)),
    Case("tiny MoE, EP 2, every feature", EP_2 | {"audit": EVERY_FEATURE}, releases=("0.23.0",)),
    Case("tiny dense, greedy, asleep", {"audit": {"sampling": [], "sleep_level": 2}}),
)
MORE_AUDITS = (
    audit_of("02-greedy"),
    audit_of("03-top-p"),
    audit_of("04-utilization-099"),
    audit_of("05-kv-cache-memory"),
    audit_of("06-xccl-off"),
    audit_of("07-kv-transfer", kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
    audit_of("08-decode-only"),
    audit_of("12-fallback-paths"),
    audit_of("13-prompt-logprobs"),
    audit_of("14-sleep"),
    audit_of("15-dense"),
    Case("seed, before the fix", {"audit": {"sampling": ["temperature", "logprobs"]}}, SEED, releases=("0.22.1",)),
)

SCENARIOS = {"dense": Case("tiny dense", FEW_BLOCKS), "MoE": Case("tiny MoE", FEW_BLOCKS | TINY_MOE)}
"""What ``tests/upstream/adapter`` runs on."""

"""Scenario files and flags: what is read, what overrides what, and the text of every refusal."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xlite_runner.bench.workload import Workload
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.config.environment import ENVIRONMENT_VARIABLES
from xlite_runner.errors import ScenarioError
from xlite_runner.flags import build_parser, overrides_from_flags
from xlite_runner.scenario import Scenario, load_scenario

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
MINIMAL = 'model = "m.json"\ndevice_profile = "a3-64g"\n'


def load(folder: Path, text: str, **overrides: Any) -> Scenario:
    path = folder / "s.toml"
    path.write_text(text)
    return load_scenario(path, overrides)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    scenario = load_scenario(path)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    assert config.ascend.xlite_graph_config.enabled


def test_published_pair_of_runs() -> None:
    scenario = load_scenario(ROOT / "examples" / "qwen3-30b-a3b-tp2-ep2.toml")
    requested = int(0.95 * 65787658240)
    assert scenario.num_ranks == 2
    assert scenario.environment == {"HCCL_BUFFSIZE": "1024"}
    assert scenario.total_memory_of(1) == 65787658240
    assert scenario.free_memory_of(0, ProfilePolicy.RUNNABLE) == requested + 30142716416 - 27260496384
    assert scenario.free_memory_of(1, ProfilePolicy.SKIP) == requested + 33509896704 - 30625051136


def test_minimal_scenario_has_defaults(tmp_path: Path) -> None:
    scenario = load(tmp_path, MINIMAL)
    assert scenario.model == tmp_path / "m.json"
    assert scenario.profile_policy is ProfilePolicy.SKIP
    assert scenario.total_memory_of(0) is None
    assert scenario.free_memory_of(0, ProfilePolicy.SKIP) is None
    assert scenario.other_processes_of(0) == []
    assert not scenario.xlite_graph_config.enabled


def test_memory_may_differ_by_rank_and_policy(tmp_path: Path) -> None:
    scenario = load(
        tmp_path,
        MINIMAL + "data_parallel_size = 2\ntotal_memory_bytes = [100, 90]\nfree_memory_bytes = { skip = [80, 70] }\n"
        "[[other_processes]]\nname = 'a'\nmemory_bytes = 5\n"
        "[[other_processes]]\nname = 'b'\nmemory_bytes = 6\nrank = 1\n",
    )
    assert [scenario.total_memory_of(rank) for rank in (0, 1)] == [100, 90]
    assert [scenario.free_memory_of(rank, ProfilePolicy.SKIP) for rank in (0, 1)] == [80, 70]
    assert scenario.free_memory_of(0, ProfilePolicy.RUNNABLE) is None
    assert [process.name for process in scenario.other_processes_of(0)] == ["a"]
    assert [process.name for process in scenario.other_processes_of(1)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_num_batch_tokens = 1", 'unknown key "max_num_batch_tokens"; did you mean "max_num_batched_tokens"?'),
        ("zzz = 1", 'unknown key "zzz"'),
        (
            "[xlite_graph_config]\nfullmode = true",
            'unknown key "xlite_graph_config.fullmode"; did you mean "full_mode"?',
        ),
        ("[[other_processes]]\nname = 'a'", 'missing key "other_processes.0.memory_bytes"'),
        ("tensor_parallel_size = 0", "tensor_parallel_size = 0: Input should be greater than 0"),
        ("max_num_seqs = '64'", "max_num_seqs = '64': Input should be a valid integer"),
        ("max_num_seqs = true", "max_num_seqs = True: Input should be a valid integer"),
        ("gpu_memory_utilization = 1.5", "gpu_memory_utilization = 1.5: Input should be less than or equal to 1"),
        ("enable_expert_parallel = 1", "enable_expert_parallel = 1: Input should be a valid boolean"),
        (
            "dtype = 'int8'",
            "dtype = 'int8': Input should be 'auto', 'bfloat16', 'float16', 'half', 'float32' or 'float'",
        ),
        ("profile_policy = 'audit'", "profile_policy = 'audit': allowed is one of runnable, skip"),
        ("free_memory_bytes = { skipp = 1 }", 'policy "free_memory_bytes.skipp"; did you mean "skip"?'),
        ("free_memory_bytes = -1", "free_memory_bytes = -1: allowed is a number of bytes > 0, or a list with one for"),
        ("free_memory_bytes = { skip = 1.5 }", "free_memory_bytes.skip = 1.5: allowed is a number of bytes > 0"),
        (
            "free_memory_bytes = [1, 2]",
            "free_memory_bytes.runnable has 2 entries: allowed is one for each of the 1 ranks",
        ),
        ("total_memory_bytes = []", "total_memory_bytes = []: allowed is a number of bytes > 0"),
        ("total_memory_bytes = 5\nfree_memory_bytes = 6", "free_memory_bytes = 6 of rank 0: allowed is at most total_"),
        ("[[other_processes]]\nname = 'a'\nmemory_bytes = 1\nrank = 1", 'rank = 1 of "a": allowed are 0 to 0'),
        ("[environment]\nHCCL_BUFSIZE = 1", 'unknown variable "HCCL_BUFSIZE"; did you mean "HCCL_BUFFSIZE"?'),
        ("[environment]\nHCCL_BUFFSIZE = 0", "HCCL_BUFFSIZE = 0: allowed is an integer >= 1"),
        ("[environment]\nHCCL_BUFFSIZE = '1.5'", "HCCL_BUFFSIZE = '1.5': allowed is an integer >= 1"),
        ("[environment]\nTASK_QUEUE_ENABLE = 3", "TASK_QUEUE_ENABLE = 3: allowed is an integer from 0 to 2"),
        (
            "[environment]\nHCCL_OP_EXPANSION_MODE = 'AI'",
            "HCCL_OP_EXPANSION_MODE = 'AI': allowed is one of AIV, AI_CPU",
        ),
        (
            "[environment]\nXLITE_DISABLE_XCCL = 'maybe'",
            "XLITE_DISABLE_XCCL = 'maybe': allowed is one of 0, 1, false, true",
        ),
        ("[environment]\nXLITE_ACTIVE_TOKENS_RATIO_PER_EP = 'x'", "_PER_EP = 'x': allowed is a number > 0"),
        ("environment = 3", "environment = 3: allowed is a table of names and values"),
    ],
)
def test_refused_values(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, f"{MINIMAL}{line}\n")
    assert str(caught.value).startswith(f"{tmp_path / 's.toml'}: ")
    assert message in str(caught.value)


def test_every_fault_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, "block_size = 0\nmodl = 'x'\n")
    lines = str(caught.value).splitlines()
    assert sum("missing key" in line for line in lines) == 2
    assert any("block_size = 0" in line for line in lines)
    assert any('unknown key "modl"; did you mean "model"?' in line for line in lines)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"none\.toml: cannot read the scenario: No such file or directory"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(ScenarioError, match="cannot read the scenario: Is a directory"):
        load_scenario(tmp_path)
    with pytest.raises(ScenarioError, match=r"not valid TOML: .*at line 2, column 9"):
        load(tmp_path, "seed = 1\nmodel = \n")
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    with pytest.raises(ScenarioError, match=r"not UTF-8 text: .* at byte 9"):
        load_scenario(tmp_path / "latin.toml")


def overrides_of(*flags: str, command: str = "profile") -> dict[str, Any]:
    return overrides_from_flags(build_parser().parse_args([command, "s.toml", *flags]))


def test_no_flag_overrides_nothing() -> None:
    assert overrides_of() == {}
    assert overrides_of("--json", "--no-progress", command="compare") == {}


def test_flags_are_vllms() -> None:
    flags = shlex.split("""
        --model other.json -tp 4 -dp 2 -pp 1 -ep --max-model-len 1024 --max-num-seqs 8 --max-num-batched-tokens 512
        --no-enable-chunked-prefill --no-enable-prefix-caching --block-size 64 --gpu-memory-utilization 0.5
        --scheduling-policy priority --long-prefill-token-threshold 256 --no-scheduler-reserve-full-isl
        --async-scheduling
        --kv-cache-memory=123 --num-gpu-blocks-override 7 --dtype half --enforce-eager --seed 3
        --profile-policy runnable --device-profile a2-64g --total-memory-bytes 100 --free-memory-bytes 90,80
        --env HCCL_BUFFSIZE=512 --env TASK_QUEUE_ENABLE=2 --other-process train=5
    """)
    flags += ["--additional-config", '{"xlite_graph_config": {"full_mode": true}}']
    flags += ["--speculative-config", '{"num_speculative_tokens": 1}']
    flags += ["--kv-transfer-config", '{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}']
    flags += ["--audit", '{"sampling": ["top_p"]}']
    overrides = overrides_of(*flags)
    assert overrides == {
        "model": Path("other.json"),
        "tensor_parallel_size": 4,
        "data_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 256,
        "scheduler_reserve_full_isl": False,
        "async_scheduling": True,
        "block_size": 64,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 123,
        "num_gpu_blocks_override": 7,
        "dtype": "half",
        "enforce_eager": True,
        "seed": 3,
        "profile_policy": "runnable",
        "device_profile": "a2-64g",
        "total_memory_bytes": 100,
        "free_memory_bytes": [90, 80],
        "environment": {"HCCL_BUFFSIZE": "512", "TASK_QUEUE_ENABLE": "2"},
        "other_processes": [{"name": "train", "memory_bytes": 5}],
        "xlite_graph_config": {"full_mode": True},
        "num_speculative_tokens": 1,
        "kv_transfer_config": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"},
        "audit": {"sampling": ["top_p"]},
    }
    assert overrides.keys() == Scenario.model_fields.keys() - {"workload", "bench", "faults"}  # bench has those


def test_flags_of_a_benchmark_are_vllms(tmp_path: Path) -> None:
    flags = shlex.split("""
        --dataset-name timed_trace --dataset-path t.jsonl --num-prompts 5 --workload-seed 6 --request-rate inf
        --burstiness 0.5 --max-concurrency 7 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2.5
        --random-input-len 8 --random-output-len 9 --random-range-ratio 0.25 --random-prefix-len 10
        --timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001 --timed-trace-label-timestamp at
        --timed-trace-label-input-length in --timed-trace-label-output-length out --timed-trace-label-hash-ids ids
        --draft-acceptance-rate 0.8 --temperature 0.7 --top-p 0.9 --top-k 20 --min-p 0.1 --no-ignore-eos
        --goodput ttft:500 tpot:50.5 e2el:9000 --metric-percentiles 50,99.9 --save-detailed --survives-errors
    """)
    overrides = overrides_from_flags(build_parser().parse_args(["bench", "s.toml", *flags]))
    assert overrides["workload"].keys() == Workload.model_fields.keys()
    assert overrides["bench"] == {
        "goodput": {"ttft": 500.0, "tpot": 50.5, "e2el": 9000.0},
        "metric_percentiles": [50.0, 99.9],
        "save_detailed": True,
        "survives_errors": True,
    }
    del overrides["workload"]["request_rate"]  # does not go with a ramp-up
    scenario = load(tmp_path, MINIMAL + "[workload]\nseed = 1\n[workload.sampling]\nmin_tokens = 2\n", **overrides)
    assert scenario.workload.seed == 6
    assert scenario.workload.sampling.min_tokens == 2
    assert not scenario.workload.sampling.ignore_eos
    assert scenario.workload.dataset_path == Path("t.jsonl")
    assert scenario.bench.metric_percentiles == (50.0, 99.9)


def test_workload_of_a_file(tmp_path: Path) -> None:
    text = '[workload]\ndataset_name = "azure"\ndataset_path = "day/trace.csv"\nrequest_rate = inf\n'
    scenario = load(tmp_path, MINIMAL + text + "[bench.goodput]\nttft = 200\n")
    assert scenario.workload.dataset_path == tmp_path / "day" / "trace.csv"
    assert scenario.bench.goodput.ttft == 200
    assert (
        json.loads(json.dumps(scenario.model_dump(mode="json"), allow_nan=False))["workload"]["request_rate"] == "inf"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[workload]\nrequest_rat = 1.0\n", 'unknown key "workload.request_rat"; did you mean "request_rate"?'),
        ("[workload]\nburstiness = 0\n", "workload.burstiness = 0: Input should be greater than 0"),
        ('[workload]\ndataset_name = "sonnet"\n', "workload.dataset_name = 'sonnet': Input should be 'random'"),
        ('[workload]\ndataset_name = "azure"\n', 'missing key "dataset_path"'),
        (
            "[workload.sampling]\ntop_p = 1.5\n",
            "workload.sampling.top_p = 1.5: Input should be less than or equal to 1",
        ),
        ("[bench.goodput]\nitl = 5\n", 'unknown key "bench.goodput.itl"'),
        ("[[faults]]\nat = 1\n", "faults: nothing happens at 1: needs one of other_process_bytes, slowdown, coll"),
        ("[[faults]]\nat = -1\nslowdown = 2\n", "faults.0.at = -1: Input should be greater than or equal to 0"),
        ("[[faults]]\nat = 1\nslowdown = 2\nrank = 1\n", "faults: rank = 1: allowed are 0 to 0"),
        ("[bench]\nmetric_percentiles = [101]\n", "bench.metric_percentiles.0 = 101: Input should be less than"),
    ],
)
def test_refused_workloads(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(message)):
        load(tmp_path, MINIMAL + text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("40960", 40960), ("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2G", 2 << 30), ("3t", 3 * 10**12)],
)
def test_readable_numbers(text: str, number: int) -> None:
    assert overrides_of("--max-model-len", text) == {"max_model_len": number}


def test_flags_override_the_file_key_by_key(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "seed = 1\nmax_num_seqs = 9\n[xlite_graph_config]\nenabled = true\n[environment]\nHCCL_BUFFSIZE = 200\n"
    )
    flags = ["--seed", "2", "--env", "TASK_QUEUE_ENABLE=0", "--model", "x.json"]
    flags += ["--additional-config", '{"xlite_graph_config": {"full_mode": true}}']
    scenario = load(tmp_path, text, **overrides_of(*flags))
    assert (scenario.seed, scenario.max_num_seqs, scenario.model) == (2, 9, Path("x.json"))
    assert scenario.xlite_graph_config.enabled
    assert scenario.xlite_graph_config.full_mode
    assert scenario.environment == {"HCCL_BUFFSIZE": "200", "TASK_QUEUE_ENABLE": "0"}


def test_refused_override_says_where_it_may_come_from(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"s\.toml, with the settings of the command line: block_size = 0"):
        load(tmp_path, MINIMAL, block_size=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "HCCL_BUFFSIZE"], "expected NAME=VALUE, found 'HCCL_BUFFSIZE'"),
        (["--other-process", "train"], "expected NAME=BYTES, found 'train'"),
        (["--other-process", "train=x"], "expected NAME=BYTES, found 'train=x'"),
        (["--free-memory-bytes", "1,b"], "expected a number of bytes, or several with commas, found '1,b'"),
        (["--additional-config", "{"], "not JSON"),
        (["--additional-config", '{"x": 1}'], "expected a JSON object with the key xlite_graph_config, found"),
        (["--max-model-len", "1.5K"], "expected a whole number, or one such as 8k, 25.6k or 8K, found '1.5K'"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["--profile-policy", "x"], "invalid choice: 'x'"),
    ],
)
def test_refused_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overrides_of(*flags)
    assert message in capsys.readouterr().err


def test_every_key_and_variable_is_documented() -> None:
    documentation = (ROOT / "docs" / "scenario.md").read_text()
    names = [*Scenario.model_fields, *ENVIRONMENT_VARIABLES]
    assert [name for name in names if f"`{name}`" not in documentation and f"[{name}]" not in documentation] == []


def test_importing_the_host_side_needs_no_torch() -> None:
    modules = "xlite_runner.scenario, xlite_runner.flags, xlite_runner.report, xlite_runner.kv_cache"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

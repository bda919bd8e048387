"""The command line: what it prints, and that a user's mistake ends in one clear line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlite_runner.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "tiny.toml"
MIB = 1 << 20

pytestmark = pytest.mark.sim_only("the command line builds a simulated world")


@pytest.fixture
def scenario(tmp_path):
    """``scenario(text, **config)``: a copy of the tiny scenario with lines put first and its model's config changed."""

    def write(text: str = "", **config: object) -> Path:
        model = json.loads((EXAMPLES / "models" / "tiny-qwen3.json").read_text()) | config
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in model.items() if value is not None}))
        toml = TINY.read_text().replace('"models/tiny-qwen3.json"', '"config.json"')
        (tmp_path / "scenario.toml").write_text(f"{text}\n{toml}")
        return tmp_path / "scenario.toml"

    return write


def refused(capsys, path: Path, *flags: str) -> str:
    """The one line on stderr of a refused start."""
    assert main(["profile", str(path), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_compare_prints_both_policies_and_their_difference(capsys):
    assert main(["compare", str(TINY)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "profile policy runnable",
        "profile policy skip",
        "skip - runnable",
        "xlite runtime pool size:",
        "Free memory on device (60.89/61.27 GiB) on startup.",
        "driver context",
        "calibrated",
    ):
        assert text in printed


def test_json_has_exact_bytes_and_a_digest(capsys):
    assert main(["profile", str(TINY), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    (rank,) = result["ranks"]
    assert result["policy"] == "skip"
    assert len(result["event_log_digest"]) == 64
    assert (
        rank["requested_memory_bytes"] - rank["weights_bytes"] - rank["peak_activation_bytes"] - rank["non_torch_bytes"]
        == rank["available_kv_cache_bytes"]
    )


def test_flags_override_the_file(capsys):
    assert main(["profile", str(TINY), "--json", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.06"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scenario"]["max_num_seqs"] == 4
    assert document["results"][0]["ranks"][0]["requested_memory_bytes"] == int(65787658240 * 0.06)


@pytest.mark.slow
def test_fresh_process_with_another_hash_seed_prints_the_same_bytes(capsys):
    """The report and the digest of the event log do not depend on the process, nor on what ran in it before."""
    fresh = subprocess.run(
        [sys.executable, "-m", "xlite_runner", "compare", str(TINY), "--json"],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert main(["compare", str(TINY), "--json"]) == 0
    assert capsys.readouterr().out == fresh


def test_unreadable_file(capsys, tmp_path):
    assert "missing.toml: cannot read the scenario: No such file" in refused(capsys, tmp_path / "missing.toml")


def test_unknown_key_with_the_one_that_was_meant(capsys, scenario):
    error = refused(capsys, scenario("max_model_length = 4096"))
    assert 'unknown key "max_model_length"' in error
    assert "max_model_len" in error.partition("did you mean")[2]


def test_unknown_architecture(capsys, scenario):
    assert "MambaForCausalLM" in refused(capsys, scenario(architectures=["MambaForCausalLM"]))


def test_missing_config_key(capsys, scenario):
    assert "num_attention_heads" in refused(capsys, scenario(num_attention_heads=None))


def test_tensor_parallel_size_that_does_not_divide_the_heads(capsys, scenario):
    error = refused(capsys, scenario(), "--tensor-parallel-size", "3")
    assert "must be divisible by tensor parallel size (3)" in error


def test_pipeline_parallel(capsys, scenario):
    error = refused(capsys, scenario(), "--pipeline-parallel-size", "2")
    assert (
        "Xlite graph mode is not compatible with pipeline parallelism. Please set pipeline_parallel_size to 1" in error
    )


def test_two_speculative_tokens(capsys, scenario):
    error = refused(capsys, scenario("num_speculative_tokens = 2"))
    assert "Xlite graph mode only support speculative decoding with num_speculative_tokens=1." in error


def test_large_blocks_are_clamped_with_a_warning(capsys, scenario):
    path = scenario()
    path.write_text(path.read_text().replace("block_size = 128", "block_size = 256"))
    flags = ("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--max-model-len", "256")
    assert main(["profile", str(path), *flags, "--json"]) == 0
    captured = capsys.readouterr()
    assert "Setting block size for xlite compatibility. original_block_size=256, new_block_size=128." in captured.err


def test_free_memory_below_the_request(capsys, scenario):
    error = refused(capsys, scenario(f"free_memory_bytes = {2048 * MIB}"))
    assert (
        "Free memory on device (2.0/61.27 GiB) on startup is less than desired GPU memory utilization (0.05, 3.06 "
        "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes." in error
    )


def test_no_memory_left_for_the_cache(capsys, scenario):
    error = refused(capsys, scenario(), "--gpu-memory-utilization", "0.0005")
    assert "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`" in error


def test_maximum_length_that_the_cache_cannot_hold(capsys, scenario):
    error = refused(capsys, scenario(max_position_embeddings=32768), "--kv-cache-memory", str(1 * MIB))
    assert "To serve at least one request with the model's max seq len (32768)" in error
    assert "the estimated maximum model length is" in error


def test_device_that_is_too_small_for_the_model(capsys, scenario):
    error = refused(capsys, scenario(f"total_memory_bytes = {700 * MIB}", vocab_size=4_000_000))
    assert "NPU out of memory. Tried to allocate" in error


def test_unknown_device_profile(capsys, scenario):
    error = refused(capsys, scenario(), "--device-profile", "a3-64")
    assert "unknown device profile 'a3-64'; there are" in error
    assert "did you mean 'a3-64g'?" in error


def test_unknown_vendor_call(npu_world):
    """Nothing is faked: a name that the double lacks is a typed error, and ``hasattr`` says so."""
    import torch_npu

    from npusim.errors import UnmodelledNameError

    assert not hasattr(torch_npu, "npu_no_such_operator")
    with pytest.raises(UnmodelledNameError, match=r"^torch_npu\.npu_no_such_operator is not modelled"):
        torch_npu.npu_no_such_operator()

"""``xlite-runner bench``: what it prints, its JSON, its pictures, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from xlite_runner.cli import main

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
FEW = ("--num-prompts", "3", "--random-input-len", "60", "--random-output-len", "4", "--no-progress")

pytestmark = pytest.mark.sim_only("the command line builds a simulated world")

VLLM_KEYS = [
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{figure}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for figure in ("mean", "median", "std", "p99")),
]  # fmt: skip
DETAILS = ["input_lens", "output_lens", "start_times", "ttfts", "itls", "errors"]


def test_json_has_vllms_keys_and_what_only_the_simulation_knows(capsys):
    assert main(["bench", str(TINY), *FEW, "--json", "--goodput", "ttft:1000", "--save-detailed"]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    assert list(result)[2 : 2 + len(VLLM_KEYS)] == VLLM_KEYS
    assert list(result)[-len(DETAILS) :] == DETAILS
    assert (result["completed"], result["failed"]) == (3, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (180, 12)
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert [len(itls) for itls in result["itls"]] == [3, 3, 3]
    assert document["scenario"]["workload"]["num_prompts"] == 3
    (memory,) = result["memory"]
    assert memory["at_end"].keys() <= memory["peak_by_owner"].keys()
    assert memory["peak_bytes"] == sum(memory["at_peak"].values()) <= memory["capacity_bytes"]
    assert memory["at_start"]["weights"] == memory["at_end"]["weights"]
    assert len(result["event_log_digest"]) == 64


def test_every_policy_side_by_side(capsys, tmp_path):
    picture = tmp_path / "memory.html"
    assert main(["bench", str(TINY), *FEW, "--compare", "runnable", "skip", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "skip / runnable",
        "Successful requests",
        "Output token throughput (tok/s)",
        "P99 TTFT (ms)",
        "Preemptions",
        "KV cache, in use",
        "budget",
        "assumed",
    ):
        assert text in printed
    assert picture.read_text().count("<figure>") == 2


def test_draft_tokens_are_counted_as_in_vllm(capsys):
    flags = ("--speculative-config", '{"num_speculative_tokens": 1}', "--draft-acceptance-rate", "0.5")
    assert main(["bench", str(TINY), *FEW, *flags, "--random-output-len", "12", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    drafts, accepted = result["spec_decode_num_drafts"], result["spec_decode_accepted_tokens"]
    assert 0 < accepted < drafts == result["spec_decode_draft_tokens"]
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafts)
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert result["spec_decode_per_position_acceptance_rates"] == [accepted / drafts]


def test_failed_requests_are_told_and_exit_code_says_so(capsys):
    flags = ("--random-input-len", "200", "--random-range-ratio", "0.5", "--max-model-len", "256")
    assert main(["bench", str(TINY), *FEW, *flags, "--num-prompts", "12"]) == 1
    printed = capsys.readouterr().out
    assert "failed: WorkloadError: prompt and output of" in printed
    assert "allowed is at most max_model_len = 256" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "0"), "workload.request_rate = 0.0: Input should be greater than 0"),
        (("--dataset-name", "azure", "--dataset-path", "none.csv"), "none.csv: cannot read the trace: No such file"),
        (("--random-input-len", "5000"), "the shortest has 5004 tokens"),
        (("--plot", "memory.svg"), "--plot memory.svg: allowed are files that end in .html or .png"),
        (("--plot", "nowhere/memory.png"), "--plot nowhere/memory.png: there is no folder nowhere"),
        (("--plot", "x" * 300 + ".html"), "cannot be written: File name too long"),
        (("--plot", "/dev/null/memory.html"), "there is no folder /dev/null"),
        (("--goodput", "itl:5"), 'unknown key "bench.goodput.itl"'),
    ],
)
def test_refused_before_anything_starts(capsys, flags, message):
    assert main(["bench", str(TINY), *FEW, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_picture_never_replaces_a_folder(capsys, tmp_path):
    (tmp_path / "memory.html").mkdir()
    assert main(["bench", str(TINY), *FEW, "--plot", str(tmp_path / "memory.html")]) == 2
    assert "memory.html: is a folder; allowed is a file" in capsys.readouterr().err


def test_a_full_disk_is_an_error_without_traceback(capsys, monkeypatch):
    with Path("/dev/full").open("w") as full, suppress(OSError):
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["bench", str(TINY), *FEW, "--json"]) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err == "xlite-runner: error: cannot write the result: No space left on device\n"


def test_a_picture_is_there_as_a_whole_or_not_at_all(capsys, tmp_path, monkeypatch):
    def fail(path, *_):
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("npusim.report.html.write_html", fail)
    assert main(["bench", str(TINY), *FEW, "--plot", str(tmp_path / "memory.html")]) == 2
    assert "memory.html: cannot be written: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

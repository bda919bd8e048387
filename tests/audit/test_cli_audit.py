"""``xlite-runner audit``: exit codes, tables, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xlite_runner.cli import main

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny.toml")
GREEDY = ("--audit", '{"sampling": []}')

pytestmark = pytest.mark.sim_only("the command line builds a simulated world")


def keys_of(value: object) -> set[str]:
    """All keys of a JSON value, however deep."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_too_small_a_reservation_is_exit_code_1_and_named(capsys):
    assert main(["audit", TINY, *GREEDY]) == 1
    printed = capsys.readouterr().out
    for text in (
        "audit of profile policy skip",
        "gpu_memory_utilization=0.05",
        "exceeds",
        "causal mask",
        "runner buffers made before the weight meter",
        "decodes, greedy",
    ):
        assert text in printed


def test_a_large_enough_one_is_exit_code_0(capsys):
    assert main(["audit", TINY, *GREEDY, "--profile-policy", "audited"]) == 0
    printed = capsys.readouterr().out
    assert "audit of profile policy audited" in printed
    assert "Findings" not in printed


@pytest.mark.slow
def test_compare_shows_all_three_policies(capsys):
    assert main(["compare", TINY, *GREEDY, "--audited"]) == 0
    printed = capsys.readouterr().out
    for policy in ("runnable", "skip", "audited"):
        assert f"profile policy {policy}" in printed
    assert "audited - runnable" in printed


def test_json_is_complete_and_documented(capsys):
    assert main(["audit", TINY, *GREEDY, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (audit,) = document["audits"]
    assert (audit["policy"], audit["safe"]) == ("skip", False)
    (rank,) = audit["ranks"]
    assert sum(term["needed_bytes"] for term in rank["terms"]) == rank["verdicts"][0]["in_use_bytes"]
    documentation = (ROOT / "docs" / "json_schema.md").read_text()
    assert [key for key in sorted(keys_of(audit)) if f"`{key}`" not in documentation] == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--audit", '{"sampling": ["beam"]}'), "audit.sampling.0 = 'beam'"),
        (("--audit", '{"sleep_level": 3}'), "audit.sleep_level = 3"),
        (("--kv-transfer-config", '{"kv_connector": "x"}'), 'missing key "kv_transfer_config.kv_role"'),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_line(capsys, flags, complaint):
    assert main(["audit", TINY, *flags]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""

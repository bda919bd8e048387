"""Tables and JSON of results: what a user reads."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from xlite_runner.report import ledger_table, print_report, ranks_table, summary_table, to_json
from xlite_runner.result import LedgerRow, ProfileResult, RankResult

MIB = 1 << 20
LEDGER = (
    LedgerRow(owner="torch segment", label="weights [0]", num_bytes=1000, grade="exact", source="model"),
    LedgerRow(owner="driver context", label="open", num_bytes=200, grade="calibrated", source="a log"),
    LedgerRow(owner="torch segment", label="weights [0]", num_bytes=50, grade="exact", source="model"),
)
RANK = RankResult(
    rank=0,
    total_memory_bytes=62740 * MIB,
    free_memory_at_start_bytes=65380495360,
    requested_memory_bytes=59603 * MIB,
    weights_bytes=29160 * MIB,
    peak_activation_bytes=651 * MIB,
    non_torch_bytes=3644 * MIB,
    graph_bytes=0,
    graph_estimate_bytes=0,
    available_kv_cache_bytes=27417782784,
    kv_cache_bytes=4357 * 6291456,
    xlite_pool_mb=519,
    suggested_kv_cache_memory_bytes=27260496384,
    suggested_kv_cache_memory_full_bytes=30142716416,
    ledger=LEDGER,
)
RUNNABLE = ProfileResult(
    policy="runnable",
    ranks=(RANK, replace(RANK, rank=1)),
    num_gpu_blocks=4357,
    num_kv_cache_tokens=557696,
    max_concurrency=4357 / 320,
    log_lines=("GPU KV cache size: 557,696 tokens", "x" * 300),
    event_log_digest="abc",
)
SKIP_RANK = replace(
    RANK,
    peak_activation_bytes=47 * MIB,
    non_torch_bytes=1044 * MIB,
    available_kv_cache_bytes=30782337536,
    ledger=LEDGER[:1],
)
SKIP = replace(
    RUNNABLE,
    policy="skip",
    ranks=(SKIP_RANK, replace(SKIP_RANK, rank=1)),
    num_gpu_blocks=4892,
    num_kv_cache_tokens=626176,
    max_concurrency=4892 / 320,
)


def render(*renderables: object) -> list[str]:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    for renderable in renderables:
        console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_summary_has_the_published_figures_and_their_difference() -> None:
    lines = render(summary_table([RUNNABLE, SKIP]))
    rows = [cells(line) for line in lines if "│" in line]
    assert rows == [
        ["runnable", "28.48", "0.64", "3.56", "0.0", "0.0", "25.53", "4,357", "557,696", "13.62x"],
        ["skip", "28.48", "0.05", "1.02", "0.0", "0.0", "28.67", "4,892", "626,176", "15.29x"],
        ["skip - runnable", "0.0", "-0.59", "-2.54", "0.0", "0.0", "+3.13", "+535", "+68,480", "+1.67x"],
    ]


def test_one_policy_has_no_difference() -> None:
    assert sum("│" in line for line in render(summary_table([SKIP]))) == 1


def test_ledger_puts_policies_side_by_side() -> None:
    rows = [cells(line) for line in render(ledger_table([RUNNABLE, SKIP])) if "│" in line]
    assert rows == [
        ["driver context", "open", "200", "-", "calibrated"],
        ["torch segment", "weights [0]", "1,050", "1,000", "exact"],
        ["total", "", "1,250", "1,000", ""],
    ]


def test_the_poorest_rank_speaks_for_all() -> None:
    poor = replace(RANK, rank=1, available_kv_cache_bytes=5 << 30)
    result = replace(RUNNABLE, ranks=(RANK, poor))
    assert result.limiting_rank is poor
    assert RUNNABLE.limiting_rank.rank == 0
    assert " 5.0 " in "\n".join(render(summary_table([result])))
    rows = [cells(line) for line in render(ranks_table([result])) if "│" in line]
    assert rows == [
        ["runnable", "0", "61.27", "60.89", "28.48", "0.64", "3.56", "0.0", "25.53"],
        ["runnable", "1", "61.27", "60.89", "28.48", "0.64", "3.56", "0.0", "5.0"],
    ]


def print_all(*results: ProfileResult) -> str:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    print_report(results, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_keeps_log_lines_whole() -> None:
    text = print_all(RUNNABLE, SKIP)
    assert text.splitlines().count("x" * 300) == 2
    assert text.index("profile policy runnable") < text.index("profile policy skip") < text.index("Where the memory")
    assert "Ranks" not in text
    assert "Ranks" in print_all(replace(RUNNABLE, ranks=(RANK, replace(RANK, rank=1, available_kv_cache_bytes=1))))


def test_json_has_exact_bytes_in_a_fixed_order() -> None:
    text = to_json([RUNNABLE, SKIP], {"seed": 0})
    document = json.loads(text)
    assert list(document) == ["schema_version", "scenario", "results", "differences"]
    assert document["schema_version"] == 1
    assert document["scenario"] == {"seed": 0}
    first = document["results"][0]
    assert list(first) == [*(field.name for field in fields(ProfileResult)), "limiting_rank"]
    assert list(first["ranks"][0]) == [field.name for field in fields(RankResult)]
    assert first["ranks"][0]["available_kv_cache_bytes"] == 27417782784
    assert first["ranks"][0]["ledger"][1]["source"] == "a log"
    assert document["differences"] == [
        {
            "from": "runnable",
            "to": "skip",
            "weights_bytes": 0,
            "peak_activation_bytes": -604 * MIB,
            "non_torch_bytes": -2600 * MIB,
            "graph_bytes": 0,
            "serving_bytes": 0,
            "available_kv_cache_bytes": 3364554752,
            "num_gpu_blocks": 535,
            "num_kv_cache_tokens": 68480,
            "max_concurrency": 535 / 320,
        }
    ]
    assert text == to_json([RUNNABLE, SKIP], {"seed": 0})
    assert text.endswith("}\n")


def test_json_of_one_policy() -> None:
    document = json.loads(to_json([SKIP]))
    assert document["scenario"] is None
    assert document["differences"] == []


@pytest.mark.parametrize("record", [ProfileResult, RankResult, LedgerRow])
def test_every_field_is_documented(record: type) -> None:
    documentation = (Path(__file__).parents[2] / "docs" / "json_schema.md").read_text()
    assert [name for name in record.__dataclass_fields__ if f"`{name}`" not in documentation] == []  # type: ignore[attr-defined]

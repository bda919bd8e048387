"""Results as tables for a terminal and as JSON (``docs/json_schema.md``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlite_runner.budget import GIB, format_gib
from xlite_runner.result import LedgerRow, ProfileResult

SCHEMA_VERSION = 1


def print_report(results: Sequence[ProfileResult], console: Console) -> None:
    """Print, for every policy, the start-up's log lines; then the memory tables of all policies side by side."""
    for result in results:
        console.rule(Text(f"profile policy {result.policy}"))
        for line in result.log_lines:
            console.print(Text(line), soft_wrap=True)
    console.print(summary_table(results))
    if any(len({rank.available_kv_cache_bytes for rank in result.ranks}) > 1 for result in results):
        console.print(ranks_table(results))
    console.print(ledger_table(results))


def summary_table(results: Sequence[ProfileResult]) -> Table:
    """One row per policy, of the rank that limits the KV cache, and the difference of each policy to the first."""
    table = Table(title="Where the memory of one device goes (GiB)", title_justify="left")
    table.add_column("policy")
    for column in (
        "weights",
        "peak activation",
        "non-torch",
        "graph",
        "serving",
        "available KV",
        "blocks",
        "tokens",
        "concurrency",
    ):
        table.add_column(column, justify="right")
    for result in results:
        *sizes, blocks, tokens, concurrency = _figures(result).values()
        table.add_row(
            result.policy, *(format_gib(size) for size in sizes), f"{blocks:,}", f"{tokens:,}", f"{concurrency:.2f}x"
        )
    for result in results[1:]:
        *sizes, blocks, tokens, concurrency = _difference(results[0], result).values()
        table.add_row(
            f"{result.policy} - {results[0].policy}",
            *(_signed_gib(size) for size in sizes),
            f"{blocks:+,}",
            f"{tokens:+,}",
            f"{concurrency:+.2f}x",
            style="bold",
        )
    return table


def ranks_table(results: Sequence[ProfileResult]) -> Table:
    """Every rank's memory, for devices that differ."""
    table = Table(title="Ranks (GiB)", title_justify="left")
    table.add_column("policy")
    for column in (
        "rank",
        "total",
        "free at start",
        "weights",
        "peak activation",
        "non-torch",
        "graph",
        "available KV",
    ):
        table.add_column(column, justify="right")
    for result in results:
        for rank in result.ranks:
            sizes = (
                rank.total_memory_bytes,
                rank.free_memory_at_start_bytes,
                rank.weights_bytes,
                rank.peak_activation_bytes,
                rank.non_torch_bytes,
                rank.graph_bytes,
                rank.available_kv_cache_bytes,
            )
            table.add_row(result.policy, str(rank.rank), *(format_gib(size) for size in sizes))
    return table


def ledger_table(results: Sequence[ProfileResult]) -> Table:
    """Who owns the bytes of the limiting rank's device, policy by policy, and how far each figure can be trusted."""
    table = Table(title="Who owns the memory (bytes)", title_justify="left")
    for column in ("owner", "label"):
        table.add_column(column)
    for result in results:
        table.add_column(result.policy, justify="right")
    table.add_column("grade")
    holdings: dict[tuple[str, str, str], list[int]] = {}
    for index, result in enumerate(results):
        for row in result.limiting_rank.ledger:
            holdings.setdefault((row.owner, row.label, row.grade), [0] * len(results))[index] += row.num_bytes
    for (owner, label, grade), sizes in sorted(holdings.items()):
        table.add_row(Text(owner), Text(label), *(f"{size:,}" if size else "-" for size in sizes), grade)
    table.add_section()
    table.add_row("total", "", *(f"{_total(result.limiting_rank.ledger):,}" for result in results), "")
    return table


def to_document(results: Sequence[ProfileResult], scenario: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The results as plain JSON values, in exact bytes and a fixed order of keys.

    Args:
        results: One per policy; differences are taken to the first.
        scenario: The settings that led to them, as JSON values.
    """
    differences = [
        {"from": results[0].policy, "to": result.policy, **_difference(results[0], result)} for result in results[1:]
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": scenario,
        "results": [asdict(result) | {"limiting_rank": result.limiting_rank.rank} for result in results],
        "differences": differences,
    }


def to_json(results: Sequence[ProfileResult], scenario: Mapping[str, Any] | None = None) -> str:
    """:func:`to_document` as text with a final line break."""
    return json.dumps(to_document(results, scenario), indent=2, allow_nan=False) + "\n"


def _figures(result: ProfileResult) -> dict[str, Any]:
    rank = result.limiting_rank
    return {
        "weights_bytes": rank.weights_bytes,
        "peak_activation_bytes": rank.peak_activation_bytes,
        "non_torch_bytes": rank.non_torch_bytes,
        "graph_bytes": rank.graph_bytes,
        "serving_bytes": rank.serving_bytes,
        "available_kv_cache_bytes": rank.available_kv_cache_bytes,
        "num_gpu_blocks": result.num_gpu_blocks,
        "num_kv_cache_tokens": result.num_kv_cache_tokens,
        "max_concurrency": result.max_concurrency,
    }


def _difference(base: ProfileResult, other: ProfileResult) -> dict[str, Any]:
    figures, base_figures = _figures(other), _figures(base)
    return {key: value - base_figures[key] for key, value in figures.items()}


def _signed_gib(num_bytes: int) -> str:
    rounded = round(num_bytes / GIB, 2)
    return f"{rounded:+}" if rounded else "0.0"


def _total(ledger: Sequence[LedgerRow]) -> int:
    return sum(row.num_bytes for row in ledger)

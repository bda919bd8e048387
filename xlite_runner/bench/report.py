"""A benchmark's results as tables for a terminal and as JSON (``docs/json_schema.md``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlite_runner.bench.metrics import RequestRecord
from xlite_runner.bench.result import BenchResult
from xlite_runner.budget import format_gib

SCHEMA_VERSION = 1
_MAX_ERRORS = 10
_LATENCY_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def print_bench_report(results: Sequence[BenchResult], console: Console) -> None:
    """Print figures and memory of all policies side by side, and the first errors."""
    console.print(figures_table(results))
    if any(result.memory for result in results):
        console.print(memory_table(results))
    for result in results:
        failed = [record for record in result.run.records if record.error is not None]
        for record in failed[:_MAX_ERRORS]:
            console.print(Text(f"{result.policy}: request {record.req_id} failed: {record.error}"))
        if len(failed) > _MAX_ERRORS:
            console.print(f"{result.policy}: {len(failed) - _MAX_ERRORS} more failed")


def figures_table(results: Sequence[BenchResult]) -> Table:
    """Figures of vLLM under its labels, and what the simulated engine can say besides; differences to the first."""
    table = Table(title="Serving benchmark, virtual time", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.policy, justify="right")
    for result in results[1:]:
        table.add_column(f"{result.policy} / {results[0].policy}", justify="right", style="bold")
    table.add_column("grade")
    time_grade = results[0].time_grade
    for label, value, is_time in _rows(results[0]):
        values = [value(result) for result in results]
        ratios = [f"{other / values[0] - 1:+.1%}" if values[0] else "-" for other in values[1:]]
        # Where an arrival process or the length of outputs decides, even durations that are wrong give right counts.
        table.add_row(label, *(_number(number) for number in values), *ratios, time_grade if is_time else "exact")
    return table


_Row = tuple[str, Callable[[BenchResult], float], bool]


def _rows(first: BenchResult) -> list[_Row]:
    """Label, figure, and whether it depends on how long things take."""
    rows: list[_Row] = [
        ("KV-cache blocks", lambda r: r.profile.num_gpu_blocks, False),
        ("Successful requests", lambda r: r.metrics.completed, False),
        ("Failed requests", lambda r: r.metrics.failed, False),
        ("Benchmark duration (s)", lambda r: r.metrics.duration, True),
        ("Total input tokens", lambda r: r.metrics.total_input_tokens, False),
        ("Total generated tokens", lambda r: r.metrics.total_output_tokens, False),
        ("Request throughput (req/s)", lambda r: r.metrics.request_throughput, True),
        ("Request goodput (req/s)", lambda r: r.metrics.request_goodput or 0.0, True),
        ("Output token throughput (tok/s)", lambda r: r.metrics.output_throughput, True),
        ("Peak output token throughput (tok/s)", lambda r: r.metrics.max_output_tokens_per_s, True),
        ("Peak concurrent requests", lambda r: r.metrics.max_concurrent_requests, True),
        ("Total token throughput (tok/s)", lambda r: r.metrics.total_token_throughput, True),
    ]
    if first.metrics.request_goodput is None:
        del rows[7]
    for name, latency in first.metrics.latencies.items():
        label = _LATENCY_LABELS[name]
        rows.append((f"Mean {label} (ms)", lambda r, n=name: r.metrics.latencies[n].mean, True))  # type: ignore[misc]
        rows.append((f"Median {label} (ms)", lambda r, n=name: r.metrics.latencies[n].median, True))  # type: ignore[misc]
        for place, (percentile, _) in enumerate(latency.percentiles):

            def value(result: BenchResult, name: str = name, place: int = place) -> float:
                return result.metrics.latencies[name].percentiles[place][1]

            rows.append((f"P{percentile:g} {label} (ms)", value, True))
    if first.run.spec_decode is not None:
        rows += [
            ("Acceptance rate (%)", lambda r: r.run.spec_decode.acceptance_rate if r.run.spec_decode else 0.0, True),
            ("Acceptance length", lambda r: r.run.spec_decode.acceptance_length if r.run.spec_decode else 0.0, True),
        ]
    return [
        *rows,
        ("Peak running requests", lambda r: r.run.load.max_num_running, True),
        ("Mean running requests", lambda r: r.run.load.mean_num_running, True),
        ("Peak waiting requests", lambda r: r.run.load.max_num_waiting, True),
        ("Preemptions", lambda r: r.run.num_preemptions, True),
        ("Peak KV-cache usage (%)", lambda r: 100 * r.run.load.max_kv_cache_usage, True),
        ("Mean KV-cache usage (%)", lambda r: 100 * r.run.load.mean_kv_cache_usage, True),
        ("Prefix-cache hits (tokens)", lambda r: r.run.prefix_cache_hits, True),
        ("Engine steps", lambda r: r.run.load.num_steps, True),
    ]


def memory_table(results: Sequence[BenchResult]) -> Table:
    """The most that each owner of the first rank's memory held while it served."""
    table = Table(title="Peak memory of rank 0 while serving (GiB)", title_justify="left")
    table.add_column("owner")
    for result in results:
        table.add_column(result.policy, justify="right")
    ranks = [result.memory[0] for result in results]
    owners = dict.fromkeys(owner for rank in ranks for owner in rank.peak_by_owner)
    for owner in sorted(owners):
        table.add_row(Text(owner), *(_gib(rank.peak_by_owner.get(owner, 0)) for rank in ranks))
    table.add_section()
    table.add_row("all together", *(_gib(rank.peak_bytes) for rank in ranks))
    table.add_row("budget", *(_gib(rank.budget_bytes) for rank in ranks))
    return table


def bench_to_document(results: Sequence[BenchResult], scenario: Mapping[str, Any], *, detailed: bool) -> dict[str, Any]:
    """The results as plain JSON values in a fixed order of keys.

    Args:
        results: One per policy; differences are taken to the first.
        scenario: The settings that led to them, as JSON values.
        detailed: With every request.
    """
    keys = ("request_throughput", "output_throughput", "total_token_throughput", "duration")
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": scenario,
        "results": [_to_dict(result, detailed=detailed) for result in results],
        "differences": [
            {"from": results[0].policy, "to": result.policy, "grade": result.time_grade}
            | {key: getattr(result.metrics, key) - getattr(results[0].metrics, key) for key in keys}
            | {"max_num_running": result.run.load.max_num_running - results[0].run.load.max_num_running}
            for result in results[1:]
        ],
    }


def bench_to_json(results: Sequence[BenchResult], scenario: Mapping[str, Any], *, detailed: bool = False) -> str:
    """:func:`bench_to_document` as text with a final line break."""
    return json.dumps(bench_to_document(results, scenario, detailed=detailed), indent=2, allow_nan=False) + "\n"


def _to_dict(result: BenchResult, *, detailed: bool) -> dict[str, Any]:
    run, load = result.run, result.run.load
    document = {
        "policy": result.policy,
        "num_gpu_blocks": result.profile.num_gpu_blocks,
        **result.metrics.to_dict(),
        **(run.spec_decode.to_dict() if run.spec_decode is not None else {}),
        "load": {
            "num_steps": load.num_steps,
            "num_replayed_steps": result.num_replayed_steps,
            "num_scheduled_tokens": load.num_scheduled_tokens,
            "max_num_running": load.max_num_running,
            "mean_num_running": load.mean_num_running,
            "max_num_waiting": load.max_num_waiting,
            "max_kv_cache_usage": load.max_kv_cache_usage,
            "mean_kv_cache_usage": load.mean_kv_cache_usage,
            "num_preemptions": run.num_preemptions,
            "prefix_cache_queries": run.prefix_cache_queries,
            "prefix_cache_hits": run.prefix_cache_hits,
        },
        "memory": [asdict(rank) for rank in result.memory],
        "time_grade": result.time_grade,
        "event_log_digest": result.event_log_digest,
    }
    return document | _details(run.records) if detailed else document


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Lists as in vLLM, an entry per request in the order of sending; what a failed one does not have is 0 or empty."""
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len if record.is_completed else 0 for record in records],
        "start_times": [record.start_time for record in records],
        "ttfts": [record.ttft if record.is_completed else 0.0 for record in records],
        "itls": [record.itls.tolist() if record.is_completed else [] for record in records],
        "errors": [record.error or "" for record in records],
    }


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _gib(num_bytes: int) -> str:
    return format_gib(num_bytes) if num_bytes else "-"

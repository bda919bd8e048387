"""Flags of ``xlite-runner bench``: those of ``vllm bench serve`` where it has them. They override the scenario."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from xlite_runner.bench.arrivals import RampUpStrategy
from xlite_runner.bench.metrics import Goodput
from xlite_runner.bench.workload import DatasetName
from xlite_runner.config import ProfilePolicy

_WORKLOAD_FLAGS = (
    "dataset_name", "dataset_path", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy",
    "ramp_up_start_rps", "ramp_up_end_rps", "random_input_len", "random_output_len", "random_range_ratio",
    "random_prefix_len", "timed_trace_chunk_hash_size", "timed_trace_sec_multiplier", "timed_trace_label_timestamp",
    "timed_trace_label_input_length", "timed_trace_label_output_length", "timed_trace_label_hash_ids",
    "draft_acceptance_rate",
)  # fmt: skip
_SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
_BENCH_FLAGS = ("goodput", "metric_percentiles", "save_detailed", "survives_errors")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of the command."""
    workload = parser.add_argument_group("workload, as in vLLM (override the scenario's table [workload])")

    def number(flag: str, summary: str, kind: Callable[[str], float] = int) -> None:
        workload.add_argument(flag, type=kind, metavar="N", help=summary)

    workload.add_argument("--dataset-name", choices=get_args(DatasetName), help="kind of workload")
    workload.add_argument("--dataset-path", type=Path, metavar="PATH", help="the trace")
    number("--num-prompts", "requests to serve")
    number("--workload-seed", "seed of lengths, tokens and arrivals")
    number("--request-rate", "requests per second; inf: all at once", float)
    number("--burstiness", "shape of the distribution of gaps; 1 is a Poisson process", float)
    number("--max-concurrency", "most requests under way")
    workload.add_argument("--ramp-up-strategy", choices=get_args(RampUpStrategy), help="how the rate changes")
    number("--ramp-up-start-rps", "rate at the start", float)
    number("--ramp-up-end-rps", "rate at the end", float)
    number("--random-input-len", "tokens of a random prompt")
    number("--random-output-len", "tokens of its output")
    number("--random-range-ratio", "lengths vary by this fraction, from 0 to less than 1", float)
    number("--random-prefix-len", "tokens that all random prompts share")
    number("--timed-trace-chunk-hash-size", "tokens of one hash id")
    number("--timed-trace-sec-multiplier", "seconds of one unit of the timestamps", float)
    for label in ("timestamp", "input-length", "output-length", "hash-ids"):
        workload.add_argument(f"--timed-trace-label-{label}", metavar="KEY", help=f"key of a timed trace's {label}")
    number("--draft-acceptance-rate", "probability that a draft token is right, with speculation", float)
    number("--temperature", "of sampling; 0 is greedy", float)
    number("--top-p", "of sampling", float)
    number("--top-k", "of sampling")
    number("--min-p", "of sampling", float)
    workload.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help="EOS ends no request")

    report = parser.add_argument_group("report")
    report.add_argument(
        "--compare",
        nargs="*",
        choices=[policy.value for policy in ProfilePolicy],
        default=None,
        help="serve under these profile policies, by default all, and show the difference",
    )
    report.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        metavar="METRIC:MS",
        help=f"limits of a good request: {', '.join(Goodput.model_fields)}",
    )
    report.add_argument("--metric-percentiles", type=_percentiles, metavar="P[,P...]", help="of the latencies")
    report.add_argument("--save-detailed", action="store_true", help="report every request")
    report.add_argument(
        "--survives-errors", action="store_true", help="an error ends the requests in the engine, not the benchmark"
    )
    report.add_argument(
        "--plot", type=Path, default=None, metavar="FILE", help="draw memory and load over time: .html or .png"
    )


def bench_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, as the scenario's tables."""
    workload = {key: given[key] for key in _WORKLOAD_FLAGS if key in given}
    if "workload_seed" in given:
        workload["seed"] = given["workload_seed"]
    if sampling := {key: given[key] for key in _SAMPLING_FLAGS if key in given}:
        workload["sampling"] = sampling
    bench = {key: given[key] for key in _BENCH_FLAGS if key in given}
    if "goodput" in bench:
        bench["goodput"] = dict(bench["goodput"])
    tables = {"workload": workload, "bench": bench}
    return {name: table for name, table in tables.items() if table}


def _limit(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    try:
        return name, float(milliseconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected METRIC:MS, found {text!r}") from None


def _percentiles(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas, found {text!r}") from None

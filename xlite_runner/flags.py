"""The command line: vLLM's flags for the engine, and a few for the device. Flags override the scenario file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xlite_runner.bench.flags import add_bench_flags, bench_overrides
from xlite_runner.config import ProfilePolicy
from xlite_runner.scenario import SCENARIO_KEYS

_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``xlite-runner``; the chosen command is in ``command``, the scenario's path in ``scenario``."""
    parser = argparse.ArgumentParser(
        prog="xlite-runner", description="Start the xlite runner on a scenario and report where the device memory goes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compare = _add_command(commands, "compare", "start once before and once after the fix, and show the difference")
    compare.add_argument("--audited", action="store_true", default=False, help="start under policy audited, too")
    _add_policy_flag(_add_command(commands, "profile", "start once under one profile policy"))
    audit = _add_command(commands, "audit", "start once, serve the worst cases, compare with what was reserved")
    _add_policy_flag(audit)
    bench = _add_command(commands, "bench", "serve the scenario's workload in virtual time")
    _add_policy_flag(bench)
    add_bench_flags(bench)
    return parser


def overrides_from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The scenario keys that were given as flags, for :func:`xlite_runner.scenario.load_scenario`."""
    given = vars(arguments)
    overrides = {key: given[key] for key in SCENARIO_KEYS if key in given}
    if "environment" in overrides:
        overrides["environment"] = dict(overrides["environment"])
    for table in ("additional_config", "speculative_config"):
        overrides |= given.get(table, {})
    return overrides | bench_overrides(given)


def _add_command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("scenario", type=Path, metavar="FILE", help="scenario (TOML), see docs/scenario.md")
    parser.add_argument("--json", action="store_true", default=False, help="print the result as JSON, in exact bytes")
    parser.add_argument("--no-progress", action="store_true", default=False, help="show no progress display")
    _add_engine_flags(parser.add_argument_group("engine, as in vLLM (override the scenario)"))
    _add_device_flags(parser.add_argument_group("device (override the scenario)"))
    return parser


def _add_policy_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile-policy",
        choices=[policy.value for policy in ProfilePolicy],
        default=argparse.SUPPRESS,
        help="what the profile run executes when xlite runs in full mode",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    def number(*flags: str, summary: str, kind: Callable[[str], int | float] = int) -> None:
        group.add_argument(*flags, type=kind, metavar="N", help=summary)

    def switch(*flags: str, summary: str) -> None:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=summary)

    group.add_argument("--model", type=Path, metavar="PATH", help="config.json of the model")
    number("--tensor-parallel-size", "-tp", summary="ranks over which every layer is split")
    number("--pipeline-parallel-size", "-pp", summary="pipeline stages")
    number("--data-parallel-size", "-dp", summary="replicas of the model")
    switch("--enable-expert-parallel", "-ep", summary="spread whole experts over the ranks")
    number("--max-model-len", kind=_readable_int, summary="longest sequence, in tokens; 32k is 32000, 32K is 32768")
    number("--max-num-seqs", summary="most requests in one step")
    number("--max-num-batched-tokens", kind=_readable_int, summary="most tokens in one step")
    switch("--enable-chunked-prefill", summary="split long prompts over several steps")
    switch("--enable-prefix-caching", summary="share the KV cache of equal prefixes")
    group.add_argument("--scheduling-policy", choices=["fcfs", "priority"], help="who is served first")
    number("--long-prefill-token-threshold", summary="most tokens of one request in one step; 0 for no such limit")
    switch("--scheduler-reserve-full-isl", summary="start a request only when its whole prompt fits")
    switch("--async-scheduling", summary="compose the next step while one runs")
    number("--block-size", summary="tokens in one KV-cache block")
    number("--gpu-memory-utilization", kind=float, summary="fraction of the device's memory that may be used")
    group.add_argument(
        "--kv-cache-memory-bytes",
        "--kv-cache-memory",
        dest="kv_cache_memory_bytes",
        type=_readable_int,
        metavar="N",
        help="bytes for the KV cache, instead of what profiling finds",
    )
    number("--num-gpu-blocks-override", summary="number of KV-cache blocks, instead of what fits")
    group.add_argument("--dtype", choices=_DTYPES, help="data type of weights and activations")
    switch("--enforce-eager", summary="capture no device graphs")
    number("--seed", summary="seed of the model's random numbers")
    group.add_argument(
        "--additional-config",
        type=_json_object("xlite_graph_config"),
        metavar="JSON",
        help='e.g. \'{"xlite_graph_config": {"enabled": true, "full_mode": true}}\'',
    )
    group.add_argument(
        "--speculative-config",
        type=_json_object("num_speculative_tokens"),
        metavar="JSON",
        help="e.g. '{\"num_speculative_tokens\": 1}'",
    )
    group.add_argument(
        "--kv-transfer-config",
        type=_json_object("kv_connector", "kv_role"),
        metavar="JSON",
        help='e.g. \'{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}\'',
    )
    group.add_argument(
        "--audit",
        type=_json_object("sampling", "fallback_paths", "sleep_level"),
        metavar="JSON",
        help='what serving may do, e.g. \'{"sampling": ["temperature", "top_p"]}\', see docs/audit.md',
    )


def _add_device_flags(group: argparse._ArgumentGroup) -> None:
    def memory(flag: str, summary: str) -> None:
        group.add_argument(flag, type=_bytes_per_rank, metavar="N[,N...]", help=f"{summary}, in bytes; one N per rank")

    group.add_argument("--device-profile", metavar="NAME", help="the simulated card")
    memory("--total-memory-bytes", "total memory of the device")
    memory("--free-memory-bytes", "memory free before the start")
    group.add_argument(
        "--other-process",
        dest="other_processes",
        action="append",
        type=_other_process,
        metavar="NAME=BYTES",
        help="memory that another process holds on every device; repeatable",
    )
    group.add_argument(
        "--env", dest="environment", action="append", type=_variable, metavar="NAME=VALUE", help="repeatable"
    )


def _readable_int(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmgtKMGT]?)", text) or re.fullmatch(r"(\d+\.\d+)([kmgt])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a whole number, or one such as 8k, 25.6k or 8K, found {text!r}")
    number, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    factor = base ** ("kmgt".index(suffix.lower()) + 1) if suffix else 1
    return int(float(number) * factor) if "." in number else int(number) * factor


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    return name, value


def _other_process(text: str) -> dict[str, Any]:
    name, _, num_bytes = text.rpartition("=")
    if not name or not num_bytes.isdecimal():
        raise argparse.ArgumentTypeError(f"expected NAME=BYTES, found {text!r}")
    return {"name": name, "memory_bytes": int(num_bytes)}


def _bytes_per_rank(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, or several with commas, found {text!r}"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _json_object(*known_keys: str) -> Callable[[str], dict[str, Any]]:
    def parse(text: str) -> dict[str, Any]:
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
        if not isinstance(content, dict) or not content.keys() <= set(known_keys):
            raise argparse.ArgumentTypeError(
                f"expected a JSON object with the key {', '.join(known_keys)}, found {text}"
            )
        return content

    return parse

"""Every profile policy on every scenario: tokens, concurrency, the smallest margin, and whether serving is safe.

python benchmarks/audit_table.py examples/audit/*.toml

Prints a Markdown table, of which docs/audit.md has a copy.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from xlite_runner.audit.result import AuditResult
from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.errors import ReservationError
from xlite_runner.scenario import load_scenario
from xlite_runner.simulation import audit

MIB = 1 << 20


def audits(path: Path) -> dict[ProfilePolicy, AuditResult | str]:
    """The scenario's audit under each policy, or why the engine does not start."""
    import torch

    scenario = load_scenario(path)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    results: dict[ProfilePolicy, AuditResult | str] = {}
    for policy in ProfilePolicy:
        try:
            results[policy] = audit(scenario, config, policy)
        except torch.OutOfMemoryError:
            results[policy] = "does not start: out of memory"
        except ReservationError as refusal:
            results[policy] = f"refused: {refusal}"
    return results


def cell(result: AuditResult | str) -> str:
    """Tokens, concurrency, margin in MiB, and what serving does."""
    if isinstance(result, str):
        return result
    profile, verdict = result.profile, result.worst_rank.verdicts[0]
    return (
        f"{profile.num_kv_cache_tokens:,}, {profile.max_concurrency:.2f}x, {verdict.margin_bytes / MIB:+,.0f} MiB, "
        f"{verdict.outcome.value}"
    )


def given_back(results: dict[ProfilePolicy, AuditResult | str]) -> tuple[str, str]:
    """What ``audited`` has less than ``skip``: of the tokens of ``skip``, and of its gain over ``runnable``."""
    started = [result.profile.num_kv_cache_tokens for result in results.values() if isinstance(result, AuditResult)]
    if len(started) < len(ProfilePolicy):
        return "-", "-"
    runnable, skip, audited = started
    gain = skip - runnable
    return f"{(skip - audited) / skip:.2%}", f"{(skip - audited) / gain:.1%}" if gain > 0 else "-"


def main() -> None:
    logging.getLogger("xlite_runner").setLevel(logging.ERROR)
    policies = " | ".join(f"`{policy.value}`" for policy in ProfilePolicy)
    print(f"| scenario | {policies} | given back, of the tokens | of the gain |")
    print("| --- |" + " --- |" * (len(ProfilePolicy) + 2))
    begin = time.process_time()
    for path in map(Path, sys.argv[1:]):
        results = audits(path)
        cells = " | ".join(cell(result) for result in results.values())
        print(f"| {path.stem} | {cells} | {' | '.join(given_back(results))} |", flush=True)
    print(f"{time.process_time() - begin:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()

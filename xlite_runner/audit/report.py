"""An audit as tables for a terminal and as JSON (``docs/json_schema.md``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlite_runner.audit.result import AuditResult, Outcome, RankAudit
from xlite_runner.budget import MIB, format_gib
from xlite_runner.report import SCHEMA_VERSION, to_document

_STYLES = {Outcome.SAFE: "green", Outcome.EXCEEDS: "yellow", Outcome.OUT_OF_MEMORY: "red", Outcome.FAILS: "red"}


def print_audit(result: AuditResult, console: Console) -> None:
    """Print the verdicts, where the memory goes at the worst moment, what each case took, and the findings."""
    rank, profile = result.worst_rank, result.profile
    console.rule(Text(f"audit of profile policy {profile.policy}"))
    console.print(
        f"{profile.num_kv_cache_tokens:,} tokens in the KV cache, {profile.max_concurrency:.2f}x; "
        f"rank {rank.rank} has the smallest margin, in: {rank.worst_case}",
        markup=False,
    )
    for table in (cases_table(rank), terms_table(rank), verdicts_table(rank)):
        console.print(table)
    if rank.findings:
        console.print(findings_table(rank))


def verdicts_table(rank: RankAudit) -> Table:
    """One row per size of the KV cache: the configuration as it is, and upstream's two proposals."""
    table = _table("Is the reservation right?", "setting", "KV cache GiB", "budget GiB", "in use GiB", "margin MiB")
    table.add_column("on the card MiB", justify="right")
    table.add_column("serving")
    for verdict in rank.verdicts:
        table.add_row(
            Text(verdict.setting),
            format_gib(verdict.kv_cache_bytes),
            format_gib(verdict.budget_bytes),
            format_gib(verdict.in_use_bytes),
            _mib(verdict.margin_bytes),
            _mib(verdict.free_at_start_bytes - verdict.in_use_bytes),
            Text(verdict.outcome, style=_STYLES[verdict.outcome]),
        )
    return table


def terms_table(rank: RankAudit) -> Table:
    """What was reserved and what was needed at the worst moment; the last line is the margin."""
    table = _table("Worst moment, term by term (MiB)", "term", "reserved", "needed", "left over")
    for term in rank.terms:
        reserved = term.reserved_bytes
        table.add_row(
            term.name,
            "-" if reserved is None else _mib(reserved),
            _mib(term.needed_bytes),
            "-" if reserved is None else _mib(reserved - term.needed_bytes),
        )
    verdict = rank.verdicts[0]
    table.add_section()
    table.add_row("all", _mib(verdict.budget_bytes), _mib(verdict.in_use_bytes), _mib(verdict.margin_bytes))
    return table


def cases_table(rank: RankAudit) -> Table:
    """What each case left of the budget, and what of it nobody had reserved, counting tensors alone."""
    table = _table("Cases", "case", "in use GiB", "margin MiB", "unreserved, tensors only MiB")
    table.add_column("error")
    budget = rank.verdicts[0].budget_bytes
    for case in rank.cases:
        unreserved = case.unreserved_tensor_bytes
        table.add_row(
            Text(case.name),
            format_gib(case.in_use_bytes),
            _mib(budget - case.in_use_bytes),
            "-" if unreserved is None else _mib(unreserved),
            Text(case.error or ""),
        )
    return table


def findings_table(rank: RankAudit) -> Table:
    """What serving takes and nobody reserved, largest first, behind what does not work."""
    table = _table("Findings", "what", "MiB")
    for column in ("in", "grade", "source"):
        table.add_column(column)
    for finding in rank.findings:
        size = "" if finding.num_bytes is None else _mib(finding.num_bytes)
        table.add_row(Text(finding.subject), size, Text(finding.when), finding.grade, Text(finding.source))
    return table


def audit_document(results: Sequence[AuditResult], scenario: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The start-ups as :func:`xlite_runner.report.to_document` has them, and the audit of each."""
    return {
        **to_document([result.profile for result in results], scenario),
        "schema_version": SCHEMA_VERSION,
        "audits": [
            {
                "policy": result.profile.policy,
                "safe": result.is_safe,
                "worst_rank": result.worst_rank.rank,
                "ranks": [_rank_document(rank) for rank in result.ranks],
            }
            for result in results
        ],
    }


def audit_json(results: Sequence[AuditResult], scenario: Mapping[str, Any] | None = None) -> str:
    """:func:`audit_document` as text with a final line break."""
    return json.dumps(audit_document(results, scenario), indent=2, allow_nan=False) + "\n"


def _rank_document(rank: RankAudit) -> dict[str, Any]:
    verdicts = [
        asdict(verdict) | {"margin_bytes": verdict.margin_bytes, "outcome": verdict.outcome.value}
        for verdict in rank.verdicts
    ]
    return asdict(rank) | {"verdicts": verdicts}


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"

"""What an audit found: plain records in exact bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from xlite_runner.result import Grade, LedgerRow, ProfileResult


class Outcome(StrEnum):
    """What serving does with a reservation."""

    SAFE = "safe"
    EXCEEDS = "exceeds"
    """It takes more than was reserved, and the card still has it."""
    OUT_OF_MEMORY = "out of memory"
    FAILS = "fails"
    """A step, or what comes after a sleep, does not work, whatever the memory."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of what a rank holds at the worst moment.

    Attributes:
        name: What it is.
        reserved_bytes: What was set aside for it; None where nothing was, since the user gave the KV cache's size.
        needed_bytes: What it took; the sum over all terms is what was in use. May be negative for a correction.
    """

    name: str
    reserved_bytes: int | None
    needed_bytes: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that serving takes and nobody reserved, or that does not work.

    Attributes:
        subject: What it is.
        when: Case or stage in which it appears.
        num_bytes: What it takes beyond the reservation; None for what does not work.
        grade: How far the figure can be trusted; on a card all are exact.
        source: Where it comes from, or what the error says.
    """

    subject: str
    when: str
    num_bytes: int | None
    grade: Grade
    source: str


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case on one rank.

    Attributes:
        in_use_bytes: Most in use at any moment, beyond what was before the start: torch's segments and everything else.
        unreserved_tensor_bytes: What was not reserved, if torch's allocator held its tensors and nothing else; without
            what was reserved for steps that the case is not one of. None where nothing was measured.
        error: Why the case failed.
        peak_ledger: Who held the memory at that moment, where somebody knows.
    """

    name: str
    in_use_bytes: int
    unreserved_tensor_bytes: int | None
    error: str | None
    peak_ledger: tuple[LedgerRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What serving's worst moment makes of one size of the KV cache.

    Attributes:
        setting: The option that leads to it.
        kv_cache_bytes: Of the KV cache's blocks.
        budget_bytes: What may be in use beyond what was before the start.
        in_use_bytes: What is in use at the worst moment.
        free_at_start_bytes: What the card has.
    """

    setting: str
    kv_cache_bytes: int
    budget_bytes: int
    in_use_bytes: int
    free_at_start_bytes: int
    fails: bool = False

    @property
    def margin_bytes(self) -> int:
        """What is left of the budget; negative if it is exceeded."""
        return self.budget_bytes - self.in_use_bytes

    @property
    def outcome(self) -> Outcome:
        """Whether that is safe."""
        if self.in_use_bytes > self.free_at_start_bytes:
            return Outcome.OUT_OF_MEMORY
        if self.fails:
            return Outcome.FAILS
        return Outcome.SAFE if self.margin_bytes >= 0 else Outcome.EXCEEDS


@dataclass(frozen=True, kw_only=True)
class RankAudit:
    """One rank. ``verdicts`` begins with the configuration as given; without findings it is safe.

    ``ran_out_of_memory`` names the case that did, so that nothing was measured after it.
    """

    rank: int
    worst_case: str
    verdicts: tuple[Verdict, ...]
    terms: tuple[Term, ...]
    findings: tuple[Finding, ...]
    cases: tuple[CaseResult, ...]
    ran_out_of_memory: str | None = None

    def after_running_out_of_memory(self, first: RankAudit) -> RankAudit:
        """These figures, and the failures of the attempt that ended for want of memory."""
        failures = tuple(finding for finding in first.findings if finding.num_bytes is None)
        others = tuple(finding for finding in self.findings if finding not in failures)
        return replace(self, findings=(*failures, *others), ran_out_of_memory=first.ran_out_of_memory)


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """One start-up and its audit.

    Where serving ran out of memory, the figures are those of another start-up with half as many blocks, to which the
    memory of the other half was added.
    """

    profile: ProfileResult
    ranks: tuple[RankAudit, ...]

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether a rank did."""
        return any(rank.ran_out_of_memory for rank in self.ranks)

    @property
    def worst_rank(self) -> RankAudit:
        """The rank with the smallest margin, a failing one before all others (first of equals)."""
        return min(self.ranks, key=lambda rank: (not rank.verdicts[0].fails, rank.verdicts[0].margin_bytes, rank.rank))

    @property
    def is_safe(self) -> bool:
        """Whether every rank is, as configured."""
        return all(rank.verdicts[0].outcome is Outcome.SAFE for rank in self.ranks)

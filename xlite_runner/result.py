"""What a profiled start-up measured: one record per policy, exact bytes, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["exact", "calibrated", "assumed"]


@dataclass(frozen=True, kw_only=True)
class LedgerRow:
    """Device memory of one owner after start-up; ``grade`` and ``source`` say how far the figure can be trusted."""

    owner: str
    label: str
    num_bytes: int
    grade: Grade
    source: str


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's figures, in bytes unless named otherwise.

    ``graph_bytes`` is what graph capture took, ``graph_estimate_bytes`` what had been set aside for it, and
    ``serving_bytes`` what policy ``audited`` set aside for what serving takes beyond the profile run. The two
    suggestions are the values that the start-up log proposes for ``--kv-cache-memory``: to fit into the requested
    memory, and to use all memory that was free at the start; None where upstream prints no suggestion.
    """

    rank: int
    total_memory_bytes: int
    free_memory_at_start_bytes: int
    requested_memory_bytes: int
    weights_bytes: int
    peak_activation_bytes: int
    non_torch_bytes: int
    graph_bytes: int
    graph_estimate_bytes: int
    available_kv_cache_bytes: int
    kv_cache_bytes: int
    serving_bytes: int = 0
    xlite_pool_mb: int | None = None
    suggested_kv_cache_memory_bytes: int | None = None
    suggested_kv_cache_memory_full_bytes: int | None = None
    ledger: tuple[LedgerRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """One start-up under one profile policy: every rank, the KV-cache plan and the log as upstream words it.

    Of several replicas, each of which plans for itself, the plan is that of the one with the smallest cache.
    """

    policy: str
    ranks: tuple[RankResult, ...]
    num_gpu_blocks: int
    num_kv_cache_tokens: int
    max_concurrency: float
    log_lines: tuple[str, ...] = ()
    event_log_digest: str | None = None

    @property
    def limiting_rank(self) -> RankResult:
        """The rank with the least memory for the KV cache, which sets its replica's blocks (first of equals)."""
        return min(self.ranks, key=lambda rank: (rank.available_kv_cache_bytes, rank.rank))

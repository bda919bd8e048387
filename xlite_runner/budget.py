"""The memory budget of one rank: from what profiling measured to what is left for the KV cache, and the log about it.

Formulas and wording of vllm-ascend's worker (0.22.1rc1, ``vllm_ascend/worker/worker.py``). All figures in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20
REDUNDANCY_BUFFER_BYTES = 150 * MIB
"""Kept out of the suggestions, since profiling may underestimate what others than torch allocate (exact, upstream)."""


def format_gib(num_bytes: float) -> str:
    """GiB as upstream prints them: rounded to two decimals, without trailing zeros (``0.0``, ``10.5``)."""
    return str(round(num_bytes / GIB, 2))


def requested_memory(total_memory: int, gpu_memory_utilization: float) -> float:
    """What the instance may use in all. A float, not rounded up, as on Ascend (upstream's GPU worker does round up)."""
    return total_memory * gpu_memory_utilization


@dataclass(frozen=True, kw_only=True)
class NonKVMemory:
    """What one rank needs besides the KV cache, as profiling measured it.

    Attributes:
        serving: What serving's worst moment takes beyond the other three, where it was measured (policy ``audited``).
    """

    weights: int
    peak_activation: int
    non_torch: int
    serving: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.weights + self.peak_activation + self.non_torch + self.serving


def available_kv_cache_memory(requested: float, non_kv: NonKVMemory, graph_estimate: int = 0) -> float:
    """What is left for the KV cache.

    Args:
        requested: Of :func:`requested_memory`.
        non_kv: What everything else needs.
        graph_estimate: What is set aside for graphs captured later.

    Returns:
        A float with a fraction below one byte, which the worker cuts off; negative if nothing is left.
    """
    return requested - non_kv.total - graph_estimate


@dataclass(frozen=True, kw_only=True)
class KVCacheMemorySuggestions:
    """Values proposed for ``--kv-cache-memory``: within the requested memory, and with all memory free at the start."""

    fit_requested: int
    use_free: int


def suggest_kv_cache_memory(
    requested: float, free_at_start: int, non_kv: NonKVMemory, graph: int
) -> KVCacheMemorySuggestions:
    """Propose sizes for the KV cache once the graphs are captured, with a margin of 150 MiB."""
    reserved = non_kv.total + graph + REDUNDANCY_BUFFER_BYTES
    return KVCacheMemorySuggestions(fit_requested=int(requested) - reserved, use_free=free_at_start - reserved)


def available_kv_cache_message(available: float) -> str:
    """The log line after profiling."""
    return f"Available KV cache memory: {available / GIB:.2f} GiB"


def graph_estimate_message(gpu_memory_utilization: float, graph_estimate: int, total: int) -> str:
    """The log line where memory is set aside for graphs: the utilization that leaves the KV cache as much without."""
    share = graph_estimate / total
    return (
        f"ACL graph memory profiling is enabled (default since v0.22.1). The current --gpu-memory-utilization="
        f"{gpu_memory_utilization:.4f} is equivalent to --gpu-memory-utilization="
        f"{round(gpu_memory_utilization - share, 4):.4f} without ACL graph memory profiling. To maintain the same "
        "effective KV cache size as before, increase --gpu-memory-utilization to "
        f"{min(round(gpu_memory_utilization + share, 4), 1.0):.4f}. To disable, set "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."
    )


def graph_memory_message(graph: int, graph_estimate: int) -> str:
    """The log line after capture: how good the estimate was."""
    difference = abs(graph - graph_estimate)
    return (
        f"ACL graph pool memory: {format_gib(graph)} GiB (actual), {format_gib(graph_estimate)} GiB (estimated), "
        f"difference: {format_gib(difference)} GiB ({100 * difference / max(graph, 1):.1f}%)."
    )


def free_memory_message(
    *,
    total: int,
    free_at_start: int,
    gpu_memory_utilization: float,
    requested: float,
    non_kv: NonKVMemory,
    graph: int,
    available: float,
) -> str:
    """The log line after warm-up: where the memory went, and the suggestions for ``--kv-cache-memory``."""
    suggested = suggest_kv_cache_memory(requested, free_at_start, non_kv, graph)
    return (
        f"Free memory on device ({format_gib(free_at_start)}/{format_gib(total)} GiB) on startup. "
        f"Desired GPU memory utilization is ({gpu_memory_utilization}, {format_gib(requested)} GiB). "
        f"Actual usage: {format_gib(non_kv.weights)} GiB for weights, "
        f"{format_gib(non_kv.peak_activation)} GiB for peak activation, "
        f"{format_gib(non_kv.non_torch)} GiB for non-torch memory, {format_gib(graph)} GiB for NPU graph memory. "
        f"Replace gpu_memory_utilization with `--kv-cache-memory={suggested.fit_requested}` "
        f"({format_gib(suggested.fit_requested)} GiB) to fit into requested memory, or "
        f"`--kv-cache-memory={suggested.use_free}` ({format_gib(suggested.use_free)} GiB) to fully utilize NPU free "
        f"memory. Current KV cache memory: {format_gib(available)} GiB."
    )

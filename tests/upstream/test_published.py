"""The pair of start-up logs published with vllm-ascend PR #11380, from upstream's own code: before and after it.

Rank 0 of two dies of an A3; what the start-up of Qwen3-30B-A3B prints there.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.sim_only("upstream runs on simulated worlds here")]

PUBLISHED = {
    "0.22.1": (
        "xlite runtime pool size: 519 MB",
        "Available KV cache memory: 25.53 GiB",
        "GPU KV cache size: 557,696 tokens",
        "Maximum concurrency for 40,960 tokens per request: 13.62x",
        "Free memory on device (60.89/61.27 GiB) on startup.",
        "28.48 GiB for weights",
        "3.56 GiB for non-torch memory",
        "`--kv-cache-memory=27260496384` (25.39 GiB) to fit into requested memory",
        "`--kv-cache-memory=30142716416` (28.07 GiB) to fully utilize NPU free memory",
    ),
    "0.23.0": (
        "xlite runtime pool size: 519 MB",
        "Available KV cache memory: 28.67 GiB",
        "GPU KV cache size: 626,176 tokens",
        "Maximum concurrency for 40,960 tokens per request: 15.29x",
        "Free memory on device (60.89/61.27 GiB) on startup.",
        "28.48 GiB for weights",
        "0.05 GiB for peak activation",
        "1.02 GiB for non-torch memory",
        "`--kv-cache-memory=30625051136` (28.52 GiB) to fit into requested memory",
        "`--kv-cache-memory=33509896704` (31.21 GiB) to fully utilize NPU free memory",
    ),
}


@pytest.mark.parametrize(
    ("release", "text"), [(release, text) for release, texts in PUBLISHED.items() for text in texts]
)
def test_published_line(upstream_results, release, text):
    """Each figure in the log's wording; peak activation before the fix depends on the device's random numbers."""
    lines = upstream_results(release)["seed, rank 0"]["log_lines"]
    assert any(text in line for line in lines)

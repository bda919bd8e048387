"""``xlite-runner bench``: workloads, the run on the engine's clock, metrics by vLLM's definitions, reports."""

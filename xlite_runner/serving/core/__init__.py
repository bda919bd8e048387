"""Scheduler, queues, block pool: what vLLM has under ``v1/core``."""

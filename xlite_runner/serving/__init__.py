"""Serving: a continuous-batching scheduler, its block pool, and what the model runner needs to execute its steps.

Names and rules are those of vLLM v1 (0.23.0) and vllm-ascend (0.23.0).
"""

"""Stands for vllm-ascend, of which the runner uses the compiled operators."""

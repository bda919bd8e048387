"""Tests of vllm-ascend's xlite package that run inside upstream's environment, on an engine that it started itself.

Their names keep them out of an ordinary session; ``tests/upstream/test_adapter.py`` runs them.
"""

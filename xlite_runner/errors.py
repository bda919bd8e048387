"""Every error that xlite_runner raises in its own name. Upstream's errors keep upstream's class (mostly ValueError)."""

from __future__ import annotations


class XliteRunnerError(Exception):
    """Root of the runner's own errors."""


class ScenarioError(XliteRunnerError, ValueError):
    """A scenario (file or flags) cannot be run; the text names the key, its value and what is allowed."""


class WorkloadError(XliteRunnerError, ValueError):
    """A workload cannot be served: a setting or a line of a trace; the text names it and says what is allowed."""


class OutputError(XliteRunnerError, OSError):
    """A result cannot be written where it was to go; the text says where, and why."""


class NeverAdmittedError(XliteRunnerError, RuntimeError):
    """A request needs more KV-cache blocks than there are."""


class EngineDeadError(XliteRunnerError, RuntimeError):
    """An error ended the engine; vLLM's name."""


class UnsupportedModelError(XliteRunnerError, ValueError):
    """The model's architecture, or a value in its ``config.json``, has no implementation here."""


class UnsupportedDeviceError(XliteRunnerError, NotImplementedError):
    """The device's generation has an implementation of its own upstream that is not available here."""


class KVCacheError(XliteRunnerError, RuntimeError):
    """Attention was to be computed over a KV cache that is not there."""


class ReservationError(XliteRunnerError, ValueError):
    """Policy ``audited`` found that serving does not fit beside the KV cache that the user asked for."""

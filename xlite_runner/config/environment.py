"""The environment variables that change what the runner or the device does, and the values they may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xlite_runner.validation import did_you_mean


@dataclass(frozen=True)
class EnvironmentVariable:
    """What a value must look like: in words, and as a test."""

    allowed: str
    accepts: Callable[[str], bool]


def _integer(low: int, high: int | None = None) -> EnvironmentVariable:
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    return EnvironmentVariable(
        allowed, lambda text: text.isdecimal() and low <= int(text) and (high is None or int(text) <= high)
    )


def _choice(*values: str) -> EnvironmentVariable:
    return EnvironmentVariable(f"one of {', '.join(values)}", lambda text: text in values)


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


_ANY_TEXT = EnvironmentVariable("a text that is not empty", bool)
_SWITCH = EnvironmentVariable(
    "one of 0, 1, false, true, no, yes, off, on",
    lambda text: text.lower() in ("0", "1", "false", "true", "no", "yes", "off", "on"),
)

ENVIRONMENT_VARIABLES: Mapping[str, EnvironmentVariable] = {
    "ASCEND_LAUNCH_BLOCKING": _integer(0, 1),
    "HCCL_BUFFSIZE": _integer(1),
    "HCCL_DETERMINISTIC": _choice("false", "true", "strict"),
    "HCCL_EXEC_TIMEOUT": _integer(0),
    "HCCL_OP_EXPANSION_MODE": _choice("AIV", "AI_CPU", "HOST", "HOST_TS"),
    "PYTORCH_NPU_ALLOC_CONF": _ANY_TEXT,
    "TASK_QUEUE_ENABLE": _integer(0, 2),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _integer(0, 1),
    "VLLM_ASCEND_ENABLE_NZ": _integer(0, 2),
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": _integer(0, 1),
    "XLITE_ACTIVE_TOKENS_RATIO_PER_EP": EnvironmentVariable("a number > 0", _is_positive_number),
    "XLITE_COMM_OPTIMIZE_LEN": _integer(0),
    "XLITE_DEVS_PER_NODE": _integer(1),
    "XLITE_DISABLE_XCCL": _SWITCH,
    "XLITE_ENABLE_GRAPH_COMM": _SWITCH,
    "XLITE_MOE_ALLTOALL": _SWITCH,
}


def validate_environment(variables: object) -> dict[str, str]:
    """Check environment variables given by a scenario or by flags.

    Args:
        variables: A table of names to texts or numbers.

    Returns:
        The same, with every value as text.

    Raises:
        ValueError: It is no table, a name is unknown, or a value is not allowed; the text says which, and what is.
    """
    if not isinstance(variables, Mapping):
        raise ValueError(f"environment = {variables!r}: allowed is a table of names and values")
    return {name: _validate(name, value) for name, value in variables.items()}


def _validate(name: str, value: object) -> str:
    variable = ENVIRONMENT_VARIABLES.get(name)
    if variable is None:
        raise ValueError(
            f'unknown variable "{name}"{did_you_mean(name, ENVIRONMENT_VARIABLES)} '
            f"(known: {', '.join(ENVIRONMENT_VARIABLES)})"
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not variable.accepts(str(value)):
        raise ValueError(f"{name} = {value!r}: allowed is {variable.allowed}")
    return str(value)

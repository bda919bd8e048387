"""A scenario: what to run, on which device. Read from a TOML file and overridden by command-line flags.

``docs/scenario.md`` lists every key with its range and default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from xlite_runner.config import EngineArgs, ModelConfig, ProfilePolicy, RunnerConfig, check_and_update_config
from xlite_runner.errors import ScenarioError
from xlite_runner.validation import explain

BytesPerRank = PositiveInt | list[PositiveInt]
"""Bytes on every rank's device, or one number per rank."""


class OtherProcess(BaseModel):
    """Device memory that a process which is not ours holds on the device of one rank, or of every rank (None)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str = Field(min_length=1)
    memory_bytes: PositiveInt
    rank: NonNegativeInt | None = None


def _profile_policy(value: object) -> object:
    if isinstance(value, ProfilePolicy):
        return value
    allowed = [policy.value for policy in ProfilePolicy]
    if value not in allowed:
        raise ValueError(f"profile_policy = {value!r}: allowed is one of {', '.join(allowed)}")
    return ProfilePolicy(value)


class Scenario(EngineArgs):
    """Engine settings plus the device and its state before the start. Get one from :func:`load_scenario`.

    ``free_memory_bytes`` and ``total_memory_bytes`` None mean: as the device profile says.
    """

    model: Path
    device_profile: str
    profile_policy: Annotated[ProfilePolicy, BeforeValidator(_profile_policy)] = ProfilePolicy.SKIP
    total_memory_bytes: BytesPerRank | None = None
    free_memory_bytes: BytesPerRank | dict[str, BytesPerRank] | None = None
    other_processes: list[OtherProcess] = Field(default_factory=list)

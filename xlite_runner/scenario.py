"""A scenario: what to run, on which device. Read from a TOML file and overridden by command-line flags.

``docs/scenario.md`` lists every key with its range and default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainValidator,
    PositiveInt,
    ValidationError,
    field_serializer,
    model_validator,
)

from xlite_runner.bench.faults import Fault
from xlite_runner.bench.metrics import BenchOptions, Goodput
from xlite_runner.bench.workload import Workload
from xlite_runner.config import EngineArgs, ProfilePolicy
from xlite_runner.config.engine_args import AuditArgs, KVTransferArgs, XliteGraphArgs
from xlite_runner.errors import ScenarioError
from xlite_runner.serving.sampling_params import SamplingParams
from xlite_runner.validation import did_you_mean, explain

BytesPerRank = int | tuple[int, ...]
"""One number of bytes that holds for every rank, or one number per rank."""

_POLICIES = {policy.value: policy for policy in ProfilePolicy}


class OtherProcess(BaseModel):
    """Device memory that a foreign process holds on the device of one rank, or on every rank's (``rank`` None)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str = Field(min_length=1)
    memory_bytes: PositiveInt
    rank: NonNegativeInt | None = None


def _parse_policy(value: object) -> ProfilePolicy:
    if isinstance(value, ProfilePolicy):
        return value
    if isinstance(value, str) and value in _POLICIES:
        return _POLICIES[value]
    raise ValueError(f"profile_policy = {value!r}: allowed is one of {', '.join(_POLICIES)}")


def _is_positive_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parse_bytes(key: str, value: object) -> BytesPerRank:
    if _is_positive_int(value):
        return value
    if isinstance(value, list) and value and all(map(_is_positive_int, value)):
        return tuple(value)
    raise ValueError(f"{key} = {value!r}: allowed is a number of bytes > 0, or a list with one for each rank")


def _parse_total_memory(value: object) -> BytesPerRank:
    return _parse_bytes("total_memory_bytes", value)


def _parse_free_memory(value: object) -> dict[ProfilePolicy, BytesPerRank]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(ProfilePolicy, _parse_bytes("free_memory_bytes", value))
    for name in value:
        if name not in _POLICIES:
            raise ValueError(
                f'unknown profile policy "free_memory_bytes.{name}"{did_you_mean(name, _POLICIES)} '
                f"(known: {', '.join(_POLICIES)})"
            )
    return {_POLICIES[name]: _parse_bytes(f"free_memory_bytes.{name}", number) for name, number in value.items()}


def _of_rank(value: BytesPerRank | None, rank: int) -> int | None:
    return value[rank] if isinstance(value, tuple) else value


class Scenario(EngineArgs):
    """Engine settings, and the device with its state before the start. Get one from :func:`load_scenario`."""

    model: Path
    device_profile: str = Field(min_length=1)
    profile_policy: Annotated[ProfilePolicy, BeforeValidator(_parse_policy)] = ProfilePolicy.SKIP
    total_memory_bytes: Annotated[BytesPerRank | None, PlainValidator(_parse_total_memory)] = None
    free_memory_bytes: Annotated[dict[ProfilePolicy, BytesPerRank] | None, PlainValidator(_parse_free_memory)] = None
    other_processes: list[OtherProcess] = Field(default_factory=list)
    workload: Workload = Workload()
    bench: BenchOptions = BenchOptions()
    faults: list[Fault] = Field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """Devices that the scenario runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def total_memory_of(self, rank: int) -> int | None:
        """Total memory of a rank's device, or None: as the device profile says."""
        return _of_rank(self.total_memory_bytes, rank)

    def free_memory_of(self, rank: int, policy: ProfilePolicy) -> int | None:
        """Memory free on a rank's device when the start-up takes its first snapshot, or None: as the profile says.

        Under policy ``audited`` it is as under ``skip``, unless the scenario says otherwise.
        """
        by_policy = self.free_memory_bytes or {}
        if policy is ProfilePolicy.AUDITED and policy not in by_policy:
            policy = ProfilePolicy.SKIP
        return _of_rank(by_policy.get(policy), rank)

    def other_processes_of(self, rank: int) -> list[OtherProcess]:
        """The foreign processes on a rank's device."""
        return [process for process in self.other_processes if process.rank in (None, rank)]

    @field_serializer("free_memory_bytes")
    def _free_memory_by_name(self, value: dict[ProfilePolicy, BytesPerRank] | None) -> dict[str, BytesPerRank] | None:
        return None if value is None else {policy.value: free for policy, free in value.items()}

    @model_validator(mode="after")
    def _check_ranks(self) -> Scenario:
        per_rank = {"total_memory_bytes": self.total_memory_bytes}
        per_rank |= {
            f"free_memory_bytes.{policy.value}": free for policy, free in (self.free_memory_bytes or {}).items()
        }
        for key, value in per_rank.items():
            if isinstance(value, tuple) and len(value) != self.num_ranks:
                raise ValueError(
                    f"{key} has {len(value)} entries: allowed is one for each of the {self.num_ranks} ranks"
                )
        for fault in self.faults:
            if fault.rank >= self.num_ranks:
                raise ValueError(f"faults: rank = {fault.rank}: allowed are 0 to {self.num_ranks - 1}")
        for process in self.other_processes:
            if process.rank is not None and process.rank >= self.num_ranks:
                raise ValueError(
                    f'other_processes: rank = {process.rank} of "{process.name}": allowed are 0 to {self.num_ranks - 1}'
                )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Scenario:
        for rank in range(self.num_ranks):
            total = self.total_memory_of(rank)
            for policy in ProfilePolicy:
                free = self.free_memory_of(rank, policy)
                if total is not None and free is not None and free > total:
                    raise ValueError(
                        f"free_memory_bytes = {free} of rank {rank}: allowed is at most total_memory_bytes = {total}"
                    )
        return self


SCENARIO_KEYS = tuple(Scenario.model_fields)
_ENGINE_TABLES = (XliteGraphArgs, KVTransferArgs, AuditArgs)
_TABLES = (*_ENGINE_TABLES, OtherProcess, Workload, SamplingParams, BenchOptions, Goodput, Fault)
_KNOWN_KEYS = (*SCENARIO_KEYS, *(key for table in _TABLES for key in table.model_fields))


def load_scenario(path: Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read a scenario file.

    Args:
        path: The TOML file; paths in it are relative to the file.
        overrides: Keys that replace those of the file. Tables are merged key by key.

    Raises:
        ScenarioError: The file cannot be read, is not TOML, has an unknown key or a value that is not allowed; the text
            names each, and suggests the key that may have been meant.
    """
    values = _read_toml(path)
    for table, key in ((values, "model"), (values.get("workload"), "dataset_path")):
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = path.parent / table[key]
    values = _merged(values, overrides or {})
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        where = f"{path}, with the settings of the command line" if overrides else str(path)
        raise ScenarioError(f"{where}: {explain(error, _KNOWN_KEYS)}") from None


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        mergeable = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if mergeable else value
    return merged


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the scenario: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None

"""What recordings of a card say about the calibrated values of its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from npusim.errors import RecordingError
from npusim.testing.recording import Recording

STEPS: Final = {
    "first operator": "operator_library_bytes",
    "first communicator": "hccl_runtime_bytes",
    "further communicator": "communicator_control_bytes",
    "MC2 operator": "mc2_workspace_bytes",
    "graph captured": "acl_graph_bytes",
}
"""Phases by what has just happened for the first time, and the value that the growth outside the allocator shows."""
_WITH_BUFFERS: Final = ("hccl_runtime_bytes", "communicator_control_bytes")


@dataclass(frozen=True, slots=True)
class Calibration:
    """One value of a profile.

    Attributes:
        key: Its name in the profile.
        value: Median of what the recordings show, in bytes.
        residuals: What each recording shows less the value.
        source: Provenance, for the profile.
    """

    key: str
    value: int
    residuals: tuple[int, ...]
    source: str


def calibrate(recordings: Sequence[Recording]) -> list[Calibration]:
    """The profile's values that the recordings show, in the profile's order.

    The total and the context are those of the first phase, which must be the process' first look at the device; all
    others are what grew outside the allocator between a phase of :data:`STEPS` and the one before.

    Raises:
        RecordingError: There is none, or they are of different devices or versions.
    """
    if not recordings:
        raise RecordingError("there is no recording to calibrate on")
    for recording in recordings[1:]:
        if (recording.device, recording.versions) != (recordings[0].device, recordings[0].versions):
            raise RecordingError(
                f"recordings of different devices or versions: {recordings[0].device} {recordings[0].versions}, "
                f"{recording.device} {recording.versions}"
            )
    shown: dict[str, list[int]] = {}
    for recording in recordings:
        for key, value in _values(recording).items():
            shown.setdefault(key, []).append(value)
    versions = ", ".join(f"{name} {version}" for name, version in recordings[0].versions.items() if name != "npusim")
    calibrations = []
    for key, values in shown.items():
        value = round(median(values))
        source = f"{len(values)} recording(s) on {recordings[0].device} with {versions}: {recordings[0].test}"
        calibrations.append(Calibration(key, value, tuple(seen - value for seen in values), source))
    return calibrations


def toml(calibrations: Sequence[Calibration]) -> str:
    """The values as they stand in a profile's file, residuals as comments."""
    return "\n".join(
        f'[{entry.key}]\nvalue = {entry.value}\ngrade = "calibrated"\nsource = "{entry.source}"\n'
        f"# residuals: {', '.join(map(str, entry.residuals))}\n"
        for entry in calibrations
    )


def _values(recording: Recording) -> dict[str, int]:
    first = recording.phases[0]
    values = {"total_bytes": first.total_bytes, "context_bytes": first.outside_bytes}
    before = first
    for phase in recording.phases[1:]:
        if phase.name in STEPS:
            key = STEPS[phase.name]
            values[key] = phase.outside_bytes - before.outside_bytes - _buffer_bytes(key, recording.environment)
        before = phase
    return values


def _buffer_bytes(key: str, environment: Mapping[str, str]) -> int:
    from npusim.hccl.communicator import DEFAULT_BUFFER_MB, WINDOW_BYTES

    if key not in _WITH_BUFFERS:
        return 0
    return 2 * (int(environment.get("HCCL_BUFFSIZE", DEFAULT_BUFFER_MB)) << 20) + WINDOW_BYTES

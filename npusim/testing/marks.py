"""What the markers on a test say, checked when the test is collected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from npusim.errors import MarkerError
from npusim.testing.choice import MAX_SEED, Choice

MARKERS = (
    "sim_only(reason): runs on the simulated device only",
    "npu_only(reason): runs on an Ascend card only",
    "needs(*capabilities): runs where the device under test has them: faults, ledger, ranks, values, xlite, ...",
    "npu_memory_limit(limit, of='allocated'): fails if the peak is higher, e.g. '600 MiB'; of: allocated or reserved",
    "npu_leaks_nothing: fails if the test leaves device memory allocated",
    "npu_profile(name): kind of simulated device; on a card, the test is skipped where the card is another",
    "npu_settings(**settings): further arguments of npusim.SimWorld for npu_world",
    "seed(number): seed of npu_world's and torch's generators",
)
MEMORY_MARKERS = ("npu_memory_limit", "npu_leaks_nothing")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most that a test's memory may grow, on any one device."""

    num_bytes: int
    of: str


def skip_reason(item: pytest.Item, choice: Choice, capabilities: Mapping[str, str | None]) -> str | None:
    """Why the test does not run on the chosen device; None: it does.

    Raises:
        MarkerError: A marker has no reason, or names a capability that nobody knows.
    """
    for name, device in (("sim_only", "sim"), ("npu_only", "npu")):
        marker = item.get_closest_marker(name)
        if marker is not None:
            reason = _text(marker, "reason", "a reason as text")
            if device != choice.device:
                return f"{name}: {reason}"
    is_ours = choice.explicit or _uses_world(item)
    for marker in item.iter_markers("needs"):
        if is_ours and marker.kwargs:  # without any argument it is needs(*[]), which all devices have
            raise MarkerError(f"{_shown(marker)}: expected capabilities, any of {', '.join(capabilities)}")
        for capability in marker.args:
            if isinstance(capability, str) and capability in capabilities:
                lack = capabilities[capability]
                if lack is not None:
                    return f"needs {capability}: {lack}"
            elif is_ours:
                close = difflib.get_close_matches(str(capability), sorted(capabilities), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise MarkerError(
                    f"needs: unknown capability {capability!r}; known are {', '.join(capabilities)}{hint}"
                )
    return None


def check(item: pytest.Item, choice: Choice) -> None:
    """Look at the arguments of the markers about the world and its memory, before the test runs.

    Raises:
        MarkerError: They are not what the marker takes.
        ProfileError: There is no profile of that name.
    """
    from npusim.device.profile import load_profile

    memory_limit(item)
    profile = profile_of(item)
    if profile is not None:
        load_profile(profile)
    marker = item.get_closest_marker("npu_leaks_nothing")
    if marker is not None and (marker.args or marker.kwargs):
        raise MarkerError(f"{_shown(marker)}: expected no arguments")
    marker = item.get_closest_marker("npu_settings")
    if marker is not None:
        if marker.args:
            raise MarkerError(f"{_shown(marker)}: expected settings by name, such as num_devices=2")
        # Those that count on a card too; the others, SimWorld looks at.
        if not _is_whole(marker.kwargs.get("num_devices", 1), at_least=1):
            raise MarkerError(f"{_shown(marker)}: num_devices must be a whole number from 1")
        if not _is_whole(marker.kwargs.get("seed", 0)):
            raise MarkerError(f"{_shown(marker)}: seed must be a whole number from 0 to 2**64 - 1")
    if _uses_world(item):  # elsewhere, a marker named seed may be the project's own
        seed_of(item, choice)


def _uses_world(item: pytest.Item) -> bool:
    return "npu_world" in getattr(item, "fixturenames", ()) or any(map(item.get_closest_marker, MEMORY_MARKERS))


def memory_limit(item: pytest.Item) -> MemoryLimit | None:
    """The marker ``npu_memory_limit``.

    Raises:
        MarkerError: It does not say how much, or of what.
    """
    marker = item.get_closest_marker("npu_memory_limit")
    if marker is None:
        return None
    of = marker.kwargs.get("of", "allocated")
    limits = _given(marker, "limit", "of")
    if len(limits) != 1 or of not in ("allocated", "reserved"):
        raise MarkerError(f"{_shown(marker)}: expected a limit, and of='allocated' or of='reserved'")
    return MemoryLimit(parse_bytes(limits[0]), of)


def world_settings(item: pytest.Item, choice: Choice) -> dict[str, Any]:
    """Arguments of :class:`npusim.SimWorld`: ``npu_settings``, then ``npu_profile`` and ``seed``, then the session."""
    settings: dict[str, Any] = {"profile": profile_of(item) or choice.profile, "seed": seed_of(item, choice)}
    settings["environment"] = {}
    marker = item.get_closest_marker("npu_settings")
    return settings if marker is None else {**settings, **marker.kwargs}


def profile_of(item: pytest.Item) -> str | None:
    """The marker ``npu_profile``.

    Raises:
        MarkerError: It does not name a profile.
    """
    marker = item.get_closest_marker("npu_profile")
    return None if marker is None else _text(marker, "name", "the name of a device profile")


def seed_of(item: pytest.Item, choice: Choice) -> int:
    """The marker ``seed``, or the session's seed.

    Raises:
        MarkerError: It is not a whole number.
    """
    marker = item.get_closest_marker("seed")
    if marker is None:
        return choice.seed
    numbers = _given(marker, "number")
    if len(numbers) != 1 or not _is_whole(numbers[0]):
        raise MarkerError(f"{_shown(marker)}: expected one whole number from 0 to 2**64 - 1")
    return int(numbers[0])


def parse_bytes(size: object) -> int:
    """Bytes of ``"600 MiB"`` or of a whole number of bytes.

    Raises:
        MarkerError: It is neither. MB and GB are refused, since they mean different sizes to different people.
    """
    if type(size) is int and size >= 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(B|[KMG]iB)", size) if isinstance(size, str) else None
    if match is None:
        raise MarkerError(f"a size is a number of bytes or a text such as '600 MiB' (B, KiB, MiB, GiB), got {size!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def _is_whole(number: object, at_least: int = 0) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and at_least <= number <= MAX_SEED


def _given(marker: pytest.Mark, name: str, *others: str) -> Sequence[Any]:
    """What is given as the marker's argument ``name``, with or without its name; nothing if there are strangers."""
    if marker.kwargs.keys() - {name, *others}:
        return ()
    return (*marker.args, *(value for key, value in marker.kwargs.items() if key == name))


def _text(marker: pytest.Mark, name: str, wanted: str) -> str:
    texts = _given(marker, name)
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise MarkerError(f"{_shown(marker)}: expected {wanted}")
    return texts[0]


def _shown(marker: pytest.Mark) -> str:
    arguments = [repr(argument) for argument in marker.args]
    arguments += [f"{name}={value!r}" for name, value in marker.kwargs.items()]
    return f"{marker.name}({', '.join(arguments)})"

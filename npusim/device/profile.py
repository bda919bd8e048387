"""What is known about a card or die: one TOML file each, every value with its grade and source."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from npusim.device.ledger import Grade
from npusim.errors import ProfileError

T = TypeVar("T", int, float, str)


class SocFamily(StrEnum):
    """The hardware generations that vendor software tells apart."""

    A2 = "A2"
    A3 = "A3"
    A5 = "A5"
    P310 = "310P"


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One value, how far it can be trusted, and where it comes from."""

    value: T
    grade: Grade
    source: str


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One card or die as software sees it. Sizes in bytes.

    Attributes:
        name: The profile's name, the stem of its file.
        family: Hardware generation, which decides how MoE layers communicate.
        soc_name: What ``get_device_name`` answers.
        soc_version: What ``torch_npu.npu.get_soc_version`` answers.
        cann_version: CANN release imitated.
        total_bytes: Memory of the device, as ``mem_get_info`` reports it.
        context_bytes: Held by a process that has opened the device and imported torch_npu, before it does anything.
        operator_library_bytes: Taken when the process launches its first operator.
        hccl_runtime_bytes: Taken when the process' first communicator does its first operation, besides its buffers.
        communicator_control_bytes: The same for each further communicator.
        mc2_workspace_bytes: Taken by the first MC2 operator on a communicator.
        acl_graph_bytes: Taken by each captured graph besides the memory in its pool.
        num_aicore: Cube cores (AI cores).
        num_vector_cores: Vector cores.
        devices_per_node: Devices that one host sees; decides whether xlite communicates through XCCL.
        l2_cache_bytes: Level-2 cache.
        hbm_bytes_per_s: Nominal rate of the device's memory.
        cube_flops_per_s: Nominal rate of the cube cores with 16-bit operands, floating-point operations per second.
        link_topology: ``mesh``: the devices of a node have a link to each other one; ``switch``: one that all share.
        link_bytes_per_s: What collectives send over such a link, one way.
        node_link_bytes_per_s: What they send to devices of other nodes, all together.
        host_to_device_bytes_per_s: Copies from host memory.
        device_to_host_bytes_per_s: Copies to host memory.
    """

    name: str
    family: SocFamily
    soc_name: Fact[str]
    soc_version: Fact[int]
    cann_version: Fact[str]
    total_bytes: Fact[int]
    context_bytes: Fact[int]
    operator_library_bytes: Fact[int]
    hccl_runtime_bytes: Fact[int]
    communicator_control_bytes: Fact[int]
    mc2_workspace_bytes: Fact[int]
    acl_graph_bytes: Fact[int]
    num_aicore: Fact[int]
    num_vector_cores: Fact[int]
    devices_per_node: Fact[int]
    l2_cache_bytes: Fact[int]
    hbm_bytes_per_s: Fact[int]
    cube_flops_per_s: Fact[int]
    link_topology: Fact[str]
    link_bytes_per_s: Fact[int]
    node_link_bytes_per_s: Fact[int]
    host_to_device_bytes_per_s: Fact[int]
    device_to_host_bytes_per_s: Fact[int]


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with npusim, sorted."""
    folder = files("npusim.device") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """Read a profile by its name, or from a file of your own (a path that ends in ``.toml``).

    Raises:
        ProfileError: There is none, or the file is not a complete, well-formed profile.
    """
    if str(name_or_path).endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"device profile {str(path)!r} cannot be read: {error.strerror}") from error
        name = path.stem
    else:
        name = str(name_or_path)
        if name not in profile_names():
            close = difflib.get_close_matches(name, profile_names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ProfileError(f"unknown device profile {name!r}; there are {', '.join(profile_names())}{hint}")
        text = (files("npusim.device") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"device profile {name!r} is not TOML: {error}") from error
    return _profile(name, table)


_FACT_TYPES = {"soc_name": str, "cann_version": str, "link_topology": str}
_CHOICES = {"link_topology": ("mesh", "switch")}
_DIVISORS = tuple(field.name for field in fields(DeviceProfile) if field.name.endswith("_per_s"))


def _profile(name: str, table: dict[str, Any]) -> DeviceProfile:
    expected = {field.name for field in fields(DeviceProfile)} - {"name"}
    for key in table.keys() - expected:
        close = difflib.get_close_matches(key, sorted(expected), n=1)
        raise ProfileError(
            f"device profile {name!r}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        )
    for key in sorted(expected - table.keys()):
        raise ProfileError(f"device profile {name!r}: key {key!r} is missing")
    try:
        family = SocFamily(table["family"])
    except ValueError:
        allowed = ", ".join(family.value for family in SocFamily)
        raise ProfileError(f"device profile {name!r}: family {table['family']!r} is none of {allowed}") from None
    facts = {key: _fact(name, key, table[key], _FACT_TYPES.get(key, int)) for key in sorted(expected - {"family"})}
    return DeviceProfile(name=name, family=family, **facts)


def _fact(profile: str, key: str, entry: Any, kind: type) -> Any:
    where = f"device profile {profile!r}, {key}"
    if not isinstance(entry, dict) or entry.keys() != {"value", "grade", "source"}:
        raise ProfileError(f"{where}: must be a table of exactly value, grade and source, got {entry!r}")
    value: Any = entry["value"]
    if type(value) is not kind:
        raise ProfileError(f"{where}: value must be of type {kind.__name__}, got {value!r}")
    if isinstance(value, int) and value < 0:
        raise ProfileError(f"{where}: value must not be negative, got {value}")
    if key in _DIVISORS and value == 0:
        raise ProfileError(f"{where}: a rate must be more than 0")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ProfileError(f"{where}: value must be one of {', '.join(_CHOICES[key])}, got {value!r}")
    try:
        grade = Grade(entry["grade"])
    except ValueError:
        raise ProfileError(f"{where}: grade {entry['grade']!r} is none of exact, calibrated, assumed") from None
    if not isinstance(entry["source"], str) or not entry["source"]:
        raise ProfileError(f"{where}: source must say where the value comes from, got {entry['source']!r}")
    return Fact(value, grade, entry["source"])

"""The double of torch_npu's device functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npusim.torch_backend.registration import has_platform, platform
from npusim.torch_backend.runtime import DeviceRuntime, device_index
from npusim.torch_backend.vendor_errors import vendor_error

INVALID_VALUE = "ERR00003 PTA invalid value"


def get_device_index(argument: Device) -> int:
    """The index that a ``device`` argument means, not checked against the devices that exist; None: the current one.

    Raises:
        ValueError: It is a device of another kind.
    """
    if isinstance(argument, device):
        return argument.idx
    if isinstance(argument, int):
        return argument
    if argument is None:
        return current_device()
    named = torch.device(argument)
    if named.type != "npu":
        raise vendor_error(ValueError, f"Expected a npu device, but got: {named}", INVALID_VALUE)
    return current_device() if named.index is None else named.index


def runtime_of(argument: Device) -> DeviceRuntime:
    """The device that an argument means; a negative index means the current one.

    Raises:
        RuntimeError: There is no such device.
        ValueError: It is a device of another kind.
    """
    active = platform()
    index = get_device_index(argument)
    return active.runtimes[active.current_device() if index < 0 else device_index(active, index)]


def own_runtimes() -> Sequence[DeviceRuntime]:
    """The devices of the calling process: all; but where each rank stands for a process, the calling rank's own."""
    active = platform()
    return [runtime_of(None)] if active.ranks.are_several else active.runtimes


def device_count() -> int:
    """How many devices the world has; 0 without a world."""
    return len(platform().runtimes) if has_platform() else 0


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def current_device() -> int:
    """Index of the calling rank's current device."""
    return platform().current_device()


def set_device(device: Device) -> None:
    """Make a device the calling rank's current one; a negative index changes nothing.

    Raises:
        RuntimeError: There is no such device.
        ValueError: It is a device of another kind.
    """
    index = get_device_index(device)
    if index >= 0:
        active = platform()
        active.set_device(device_index(active, index))


class device:  # noqa: N801 - torch_npu's name
    """Another current device inside a ``with`` block; a negative index changes nothing.

    Attributes:
        idx: The device's index.
    """

    def __init__(self, device: Device) -> None:
        self.idx = get_device_index(device)
        self._previous = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self._previous = current_device()
            set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        if self.idx >= 0:
            set_device(self._previous)


Device = torch.device | int | str | device | None


class device_of(device):  # noqa: N801 - torch_npu's name
    """The device of a tensor or storage is current inside a ``with`` block; nothing changes for one on the host."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.is_npu else -1)


def synchronize(device: Device = None) -> None:
    """Wait until every stream of a device is idle."""
    runtime = runtime_of(device)
    runtime.refuse_in_capture("synchronize")
    runtime.synchronize_device()


@dataclass(frozen=True)
class DeviceProperties:
    """What ``get_device_properties`` answers. Sizes in bytes."""

    name: str
    total_memory: int
    cube_core_num: int
    vector_core_num: int
    L2_cache_size: int

    @property
    def multi_processor_count(self) -> int:
        """Torch's name for the vector cores."""
        return self.vector_core_num


def _listed(device: Device) -> DeviceRuntime:
    active = platform()
    index = get_device_index(device)
    if not 0 <= index < len(active.runtimes):
        raise vendor_error(AssertionError, "Invalid device id", INVALID_VALUE)
    return active.runtimes[index]


def get_device_name(device: Device = None) -> str:
    """The chip's name, e.g. ``Ascend910_9382``.

    Raises:
        AssertionError: There is no such device.
    """
    return _listed(device).card.profile.soc_name.value


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name, memory and core counts of a device.

    Raises:
        AssertionError: There is no such device.
    """
    card = _listed(device).card
    profile = card.profile
    return DeviceProperties(
        profile.soc_name.value,
        card.hbm.total_bytes,
        profile.num_aicore.value,
        profile.num_vector_cores.value,
        profile.l2_cache_bytes.value,
    )


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the whole device.

    Raises:
        AssertionError: There is no such device.
    """
    return _listed(device).card.hbm.mem_get_info()


def get_soc_version() -> int:
    """The chip's number in torch_npu's enumeration."""
    return runtime_of(None).card.profile.soc_version.value


def init() -> None:
    """Nothing to do: devices are open as soon as there is a world."""


def is_initialized() -> bool:
    """Whether there is a world."""
    return has_platform()

"""The double of ``triton.runtime.driver``: what the device is."""

from __future__ import annotations

from dataclasses import dataclass

from npusim.torch_backend.registration import has_platform, platform


class NPUUtils:
    """Facts about devices."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Core counts of a device."""
        profile = platform().runtimes[device].card.profile
        return {"num_aicore": profile.num_aicore.value, "num_vectorcore": profile.num_vector_cores.value}


class NPUDriver:
    """Triton's way to device ``npu``."""

    def __init__(self) -> None:
        self.utils = NPUUtils()

    @staticmethod
    def is_active() -> bool:
        """Whether there is a device; there is one wherever the double of torch_npu is imported."""
        return True

    def get_current_device(self) -> int:
        """Index of the current device; 0 without a world."""
        return platform().current_device() if has_platform() else 0


@dataclass(frozen=True)
class DriverConfig:
    """``triton.runtime.driver``.

    Attributes:
        active: The driver in use.
    """

    active: NPUDriver


driver = DriverConfig(NPUDriver())

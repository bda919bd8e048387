"""Pinned host memory beside a device buffer: filled by NumPy, copied to the device without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class HostTwin:
    """The host side of a device buffer.

    Args:
        device: The buffer.

    Attributes:
        device: The buffer.
        np: Host memory of the same shape and type.
    """

    def __init__(self, device: torch.Tensor) -> None:
        self.device = device
        self._host = torch.zeros(device.shape, dtype=device.dtype, device="cpu", pin_memory=True)
        self.np: NDArray[Any] = self._host.numpy()

    def upload(self, num_rows: int) -> torch.Tensor:
        """Copy the first rows to the device; returns them there."""
        rows = self.device[:num_rows]
        rows.copy_(self._host[:num_rows], non_blocking=True)
        return rows

    def fill(self, values: NDArray[Any]) -> torch.Tensor:
        """Overwrite the first rows on both sides; returns them on the device."""
        num_rows = len(values)
        self.np[:num_rows] = values
        return self.upload(num_rows)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A new device tensor of these numbers, by way of pinned memory."""
    return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(device, non_blocking=True)

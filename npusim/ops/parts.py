"""What each rank brings to a collective, and how results follow from all parts, of which some are other processes'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from npusim.hccl.ranks import Arrival, Portable
from npusim.torch_backend.registration import platform
from npusim.torch_backend.values import Compute


@dataclass
class Part(Portable):
    """One rank's part of a collective.

    Attributes:
        inputs: Tensors that it reads; in another process host tensors, or None where nobody computed the values.
        outputs: Tensors that it writes; they never leave its process.
        extra: What the collective's check gets.
        arrival: When it is ready.
    """

    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor]
    extra: Any
    arrival: Arrival

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets."""
        inputs = [None if tensor is None else _on_host(tensor) for tensor in self.inputs]
        return self.__dict__ | {"inputs": inputs, "outputs": ()}


def _on_host(tensor: Tensor) -> Tensor | None:
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    values = platform().values
    return values.read(tensor).clone() if values.known([tensor]) else None


def update(targets: Sequence[Tensor], sources: Sequence[Tensor | None], compute: Compute) -> None:
    """Let device tensors be overwritten with what follows from others, of which some may be on the host."""
    values = platform().values
    if any(source is None for source in sources):
        values.forget(targets)
        return
    on_device = [source for source in sources if source is not None and source.device.type == "npu"]
    if len(on_device) == len(sources):
        values.update(targets, on_device, compute)
        return
    # What is computed later must hold no tensor of the device.
    given = [None if source is not None and source.device.type == "npu" else source for source in sources]

    def compute_with_others(*hosts: Tensor) -> Any:
        each = iter(hosts)
        return compute(*[next(each) if source is None else source for source in given])

    values.update(targets, on_device, compute_with_others)

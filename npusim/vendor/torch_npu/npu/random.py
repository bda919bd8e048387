"""The double of ``torch_npu.npu.random``: the devices' default generators."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch_npu.npu.devices import Device, own_runtimes, runtime_of


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    runtime_of(None).random.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices of this process; where each rank stands for a process, of its own device."""
    for runtime in own_runtimes():
        runtime.random.manual_seed(int(seed))


def initial_seed() -> int:
    """The seed of the current device's generator."""
    seed: int = runtime_of(None).random.seed
    return seed


def get_rng_state(device: Device = "npu") -> Tensor:
    """A device's generator as 16 bytes: its seed, then its offset."""
    state: Tensor = runtime_of(device).random.get_state()
    return state


def get_rng_state_all() -> list[Tensor]:
    """The generators of all devices of this process."""
    return [runtime.random.get_state() for runtime in own_runtimes()]


def set_rng_state(new_state: Tensor, device: Device = "npu") -> None:
    """Put a device's generator into the state that :func:`get_rng_state` gave."""
    runtime_of(device).random.set_state(new_state)


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Put the generators of all devices of this process into given states."""
    for runtime, state in zip(own_runtimes(), new_states, strict=True):
        runtime.random.set_state(state)

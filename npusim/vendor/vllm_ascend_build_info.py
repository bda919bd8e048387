"""The double of ``vllm_ascend._build_info``: built for whatever kind of device the active world has."""

from __future__ import annotations

from npusim.device.profile import SocFamily
from npusim.torch_backend.registration import platform


def __getattr__(name: str) -> str:
    if name != "__device_type__":
        raise AttributeError(f"vllm_ascend._build_info has no {name}")
    family = platform().runtimes[0].card.profile.family
    return "_310P" if family is SocFamily.P310 else family.value

"""The double of ``vllm_ascend.vllm_ascend_C``, vllm-ascend's compiled extension.

The operators of ``torch.ops._C_ascend`` are defined with the other operators; those that nobody modelled raise when
called. Functions for sleep mode are not modelled, and vllm-ascend switches sleep mode off without them.
"""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledNameError

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"vllm_ascend.vllm_ascend_C.{name} is not modelled on the simulated device")

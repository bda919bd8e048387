"""The double of ``vllm_ascend.vllm_ascend_C``, vllm-ascend's compiled extension.

Importing it defines the operators of ``torch.ops._C_ascend``; those that nobody modelled raise when they are called. Its
functions for sleep mode are not modelled, and vllm-ascend switches sleep mode off without them.
"""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledNameError

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"vllm_ascend.vllm_ascend_C.{name} is not modelled on the simulated device")

"""The double of ``torch_npu._inductor``: importing it gives torch's compiler a backend, which is not modelled.

Compiling for device ``npu`` raises in torch itself, which then finds no backend.
"""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledNameError


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch_npu._inductor.{name} is not modelled on the simulated device")

"""The double of ``torch_npu.npu.config``: settings of torch_npu's operators."""

from __future__ import annotations

from typing import Any

from npusim.errors import UnmodelledCallError, UnmodelledNameError


class Config:
    """``torch.npu.config``, with the settings that are modelled.

    Attributes:
        allow_internal_format: Whether operators may choose private memory formats by themselves. Only plain formats are
            modelled, in which every operator works, so that this changes nothing here.
    """

    def __init__(self) -> None:
        self.allow_internal_format = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "allow_internal_format":
            raise UnmodelledCallError(f"torch.npu.config.{name} is not modelled on the simulated device")
        super().__setattr__(name, bool(value))

    def __getattr__(self, name: str) -> Any:
        raise UnmodelledNameError(f"torch.npu.config.{name} is not modelled on the simulated device")


config = Config()

"""What goes wrong while a workload is served: the list ``[[faults]]`` of a scenario."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from xlite_runner.bench.traces import MAX_SECONDS


class Fault(BaseModel):
    """Something that happens to one rank's device; at least one thing.

    Attributes:
        at: Seconds after the first request.
        rank: Whose device.
        other_process_bytes: Another process takes so many bytes more, or gives them back if negative.
        slowdown: From then on kernels take so many times as long as the profile says.
        collective_delay: Seconds that the device comes late to its next HCCL collective.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    at: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    rank: NonNegativeInt = 0
    other_process_bytes: int = 0
    slowdown: Annotated[float, Field(gt=0, le=1e6)] | None = None
    collective_delay: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 0.0

    @model_validator(mode="after")
    def _check_something_happens(self) -> Self:
        if not self.other_process_bytes and self.slowdown is None and not self.collective_delay:
            raise ValueError(
                f"faults: nothing happens at {self.at:g}: needs one of other_process_bytes, slowdown, collective_delay"
            )
        return self

"""The double of ``triton.backends``: one backend, that of device ``npu``."""

from __future__ import annotations

from dataclasses import dataclass

from triton.runtime.driver import NPUDriver


@dataclass(frozen=True)
class Backend:
    """A backend as ``triton.backends`` lists it."""

    driver: type[NPUDriver]


backends = {"ascend": Backend(NPUDriver)}

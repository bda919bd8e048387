"""What of xlite's memory does not survive a sleep of level 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from xlite_runner.audit.result import Finding

if TYPE_CHECKING:
    from xlite_runner.worker import NPUWorker

LEVEL_THAT_DROPS_WEIGHTS = 2


def undefined_after_sleep(worker: NPUWorker) -> Iterator[Finding]:
    """Tables of xlite that come back from a sleep undefined, if the engine may be put to sleep that deep.

    Everything that ``load_model`` makes lies in the pool "weights". Level 2 gives that pool up without a copy, except
    for the model's named buffers; parameters are loaded anew. What xlite keeps besides the two is made once and never
    again. Exact as to the order of the code (vllm-ascend 0.23.0); found by looking at the tensors, not by sleeping.
    """
    adapter = getattr(worker.model_runner.model, "adapter", None)
    if worker.config.audit.sleep_level < LEVEL_THAT_DROPS_WEIGHTS or adapter is None:
        return
    model = worker.model_runner.get_model()
    restored = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, tensors in adapter.tensors().items():
        lost = {_storage(tensor): tensor for tensor in tensors if _storage(tensor) not in restored}
        if lost:
            num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in lost.values())
            yield Finding(
                subject=f"xlite's {name} is undefined after a sleep of level 2",
                when="wake_up",
                num_bytes=None,
                grade="exact",
                source=f'{num_bytes} bytes in pool "weights", neither a parameter nor a named buffer of the model',
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

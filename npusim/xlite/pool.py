"""``Model.get_tensor_pool_size``: the dummy runs of the forward on a counting pool."""

from __future__ import annotations

from dataclasses import dataclass

from npusim.xlite.arena import Arena
from npusim.xlite.forward import forward, forward_logits
from npusim.xlite.forward_pass import ForwardPass, Step
from npusim.xlite.rank_model import RankModel
from npusim.xlite.tensors import PoolEvent, Tensor, TensorPool

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What the dummy runs found.

    Attributes:
        num_bytes: Highest end address that was reached.
        at_peak: The tensors that were live when it was reached, oldest first.
        overruns: Copies of the real library's dummy run that go past their device buffer. With any of them the size is
            valid, but the call itself is unsafe: the process may crash.
    """

    num_bytes: int
    at_peak: tuple[Tensor, ...]
    overruns: int

    @property
    def megabytes(self) -> int:
        """What ``get_tensor_pool_size`` returns: the bytes in units of 2^20, rounded up."""
        return -(-self.num_bytes // _MIB)


def tensor_pool_size(model: RankModel) -> PoolSize:
    """The size of the tensor pool that a rank of this model asks for.

    Grade: exact; equal to the real libraries on the golden configurations.

    Raises:
        RuntimeError, ValueError: What the library raises, with its text.
        UnmodelledCallError: The version, or something in the configuration, is not modelled.
    """
    pool = counting_pool(model)
    dummy_runs(model.shortened(), pool)
    return PoolSize(pool.arena.peak_bytes, pool.at_peak, _overruns(model))


def counting_pool(model: RankModel, events: list[PoolEvent] | None = None) -> TensorPool:
    """A pool without a limit, for sizing; ``events`` records what is taken and put back."""
    return TensorPool(Arena(), bits_round_up=model.behaviour.bits_round_up, events=events)


def dummy_runs(model: RankModel, pool: TensorPool) -> None:
    """The passes that the library runs, over all layers: a prefill of ``max_m`` tokens, in 0.2.0rc4 also a decode.

    Raises:
        RuntimeError, ValueError, UnmodelledCallError: As :func:`tensor_pool_size`.
    """
    config = model.config
    _dummy_run(model, pool, [model.max_m], [max(config.max_seq_len - model.max_m, 0)])
    if model.behaviour.decode_run:
        batch = config.max_batch_size
        _dummy_run(model, pool, [1] * batch, [max(config.max_seq_len - 1, 0)] * batch)


def _dummy_run(model: RankModel, pool: TensorPool, lens: list[int], cached_lens: list[int]) -> None:
    run = ForwardPass(model, pool, Step.of(model, lens, cached_lens))
    config, dtype, tp_size = model.config, model.weights.dtype, model.tp.size
    output = Tensor((run.step.num_tokens, config.hidden_size), dtype)
    logits = Tensor((tp_size, config.max_batch_size, config.vocab_size // tp_size), dtype)
    forward(run, output)
    forward_logits(run, output, logits)


def _overruns(model: RankModel) -> int:
    """Each dummy run copies its block table twice into a buffer sized for ``max_batch_size`` requests."""
    config = model.config
    blocks = -(-max(model.max_m, config.max_seq_len) // config.block_size)
    room = config.max_batch_size * -(-config.max_seq_len // config.block_size)
    return 2 if model.behaviour.block_tables_overrun and blocks > room else 0

"""Which steps run as captured graphs, and padded to what."""

from __future__ import annotations

from collections.abc import Sequence

from xlite_runner.config import CUDAGraphMode, RunnerConfig
from xlite_runner.forward_context import BatchDescriptor


class CudagraphDispatcher:
    """The rules of vLLM's dispatcher: full graphs for uniform decode steps, piecewise ones for others.

    Piecewise graphs are cut out of the model by torch.compile. The model is not compiled here; the steps that upstream
    has them for (mode FULL_AND_PIECEWISE) run as written, padded to the same sizes.

    Args:
        config: The engine's configuration.

    Attributes:
        full_sizes: Token counts of the full graphs, ascending.
        piecewise_sizes: Token counts that upstream would also capture piecewise, ascending.
    """

    def __init__(self, config: RunnerConfig) -> None:
        compilation = config.compilation
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._decode_query_len = config.uniform_decode_query_len
        sizes = self._whole_requests(compilation.cudagraph_capture_sizes)
        most_decode_tokens = self._max_num_seqs * self._decode_query_len
        decode_sizes = tuple(size for size in sizes if size <= most_decode_tokens)
        self.full_sizes = decode_sizes if compilation.cudagraph_mode.has_full_cudagraphs else ()
        self.piecewise_sizes = sizes if compilation.cudagraph_mode.has_piecewise_cudagraphs else ()

    def _whole_requests(self, capture_sizes: tuple[int, ...]) -> tuple[int, ...]:
        query_len = self._decode_query_len
        rounded = {-(-size // query_len) * query_len for size in capture_sizes}
        return tuple(sorted(size for size in rounded if size <= max(capture_sizes)))

    @property
    def capture_descs(self) -> tuple[BatchDescriptor, ...]:
        """The steps to capture, largest first, so that smaller graphs find room in the memory of larger ones."""
        return tuple(self._decode_descriptor(size) for size in reversed(self.full_sizes))

    def dispatch(
        self, num_tokens: int, *, uniform_decode: bool, piecewise_only: bool = False
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """How a step runs, and its shape with padding.

        Args:
            num_tokens: Tokens of the step.
            uniform_decode: Whether every request brings the tokens of one decode step.
            piecewise_only: No full graph is replayed.
        """
        if uniform_decode and not piecewise_only and (padded := _next(self.full_sizes, num_tokens)):
            return CUDAGraphMode.FULL, self._decode_descriptor(padded)
        if padded := _next(self.piecewise_sizes, num_tokens):
            return CUDAGraphMode.PIECEWISE, BatchDescriptor(padded)
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)

    def _decode_descriptor(self, num_tokens: int) -> BatchDescriptor:
        return BatchDescriptor(num_tokens, num_tokens // self._decode_query_len, uniform=True)


def _next(sizes: Sequence[int], num_tokens: int) -> int | None:
    return next((size for size in sizes if size >= num_tokens), None)

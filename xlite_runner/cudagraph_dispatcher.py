"""Which steps run as captured graphs, and padded to what."""

from __future__ import annotations

from xlite_runner.config import CUDAGraphMode, RunnerConfig
from xlite_runner.forward_context import BatchDescriptor


class CudagraphDispatcher:
    """The rules of vLLM's dispatcher for full graphs of uniform decode steps.

    Piecewise graphs, which upstream's mode FULL_AND_PIECEWISE has for all other steps, are cut out of the model by
    torch.compile. The model is not compiled here, and those steps run eagerly.

    Args:
        config: The engine's configuration.

    Attributes:
        full_sizes: Token counts of the full graphs, ascending.
        num_piecewise_sizes: How many token counts upstream would also capture piecewise.
    """

    def __init__(self, config: RunnerConfig) -> None:
        compilation = config.compilation
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._decode_query_len = config.uniform_decode_query_len
        sizes = compilation.cudagraph_capture_sizes
        self.full_sizes = self._decode_sizes(sizes) if compilation.cudagraph_mode.has_full_cudagraphs else ()
        self.num_piecewise_sizes = len(sizes) if compilation.cudagraph_mode.has_piecewise_cudagraphs else 0

    def _decode_sizes(self, capture_sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Whole requests, and not more of them than there can be."""
        query_len = self._decode_query_len
        rounded = {-(-size // query_len) * query_len for size in capture_sizes}
        largest = min(max(capture_sizes, default=0), self._max_num_seqs * query_len)
        return tuple(sorted(size for size in rounded if size <= largest))

    @property
    def capture_descs(self) -> tuple[BatchDescriptor, ...]:
        """The steps to capture, largest first, so that smaller graphs find room in the memory of larger ones."""
        return tuple(self._decode_descriptor(size) for size in reversed(self.full_sizes))

    def dispatch(self, num_tokens: int, *, uniform_decode: bool) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """How a step runs, and its shape with padding.

        Args:
            num_tokens: Tokens of the step.
            uniform_decode: Whether every request brings the tokens of one decode step.
        """
        padded = next((size for size in self.full_sizes if size >= num_tokens), None)
        if padded is None or not uniform_decode:
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        return CUDAGraphMode.FULL, self._decode_descriptor(padded)

    def _decode_descriptor(self, num_tokens: int) -> BatchDescriptor:
        return BatchDescriptor(num_tokens, num_tokens // self._decode_query_len, uniform=True)

"""Who executes a forward pass: xlite, the model itself, or nobody. Decisions only; no device is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.attention_metadata import AscendAttentionState, AscendMetadata


class Route(Enum):
    """Where a forward pass goes."""

    XLITE = "xlite"
    RUNNABLE = "runnable"
    """The model itself."""
    HIDDEN_STATES = "hidden_states"
    """Nowhere: the wrapper's hidden-states buffer, whatever it holds, is the result."""


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """The rules of one wrapper.

    Attributes:
        full_mode: xlite takes prefill and decode; else decode only.
        data_parallel_size: With several ranks, which must decide alike, the padded batch counts instead of its kind.
        metadata_type: Attention metadata that xlite can work from.
        skips_profile_run: In full mode a profile run executes nothing, as serving will not execute the model either.
    """

    full_mode: bool
    data_parallel_size: int
    metadata_type: type[AscendMetadata]
    skips_profile_run: bool

    def route(self, context: ForwardContext) -> Route:
        """Where the forward pass of this context goes."""
        if context.in_profile_run and self.skips_profile_run:
            return Route.HIDDEN_STATES if self.full_mode else Route.RUNNABLE
        metadata = first_metadata(context.attn_metadata)
        if not isinstance(metadata, self.metadata_type):
            return Route.RUNNABLE
        return Route.XLITE if self.full_mode or self._is_decode(context, metadata) else Route.RUNNABLE

    def _is_decode(self, context: ForwardContext, metadata: AscendMetadata) -> bool:
        if self.data_parallel_size > 1:
            batch = context.batch_descriptor
            return batch.num_reqs is not None and batch.num_tokens <= batch.num_reqs
        return metadata.attn_state in (AscendAttentionState.DECODE_ONLY, AscendAttentionState.SPEC_DECODING)


def first_metadata(attn_metadata: object) -> object:
    """The metadata of one layer out of those of all (by name, or a list of such mappings); None if there is none."""
    if isinstance(attn_metadata, Sequence):
        attn_metadata = attn_metadata[0]
    if isinstance(attn_metadata, Mapping):
        attn_metadata = next(iter(attn_metadata.values()), None)
    return attn_metadata

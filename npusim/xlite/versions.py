"""What differs between the versions of xlite that can be imitated, as data.

Grades: 0.1.0rc11 and 0.2.0rc0 exact, read in GVirt (tags 0.1.0rc11 and 0.2.0rc0) and equal to the real libraries on the
golden configurations; 0.2.0rc4 has no public source and is exact as far as those configurations reach. Places of checks
are exact for 0.2.0rc4, seen in its messages, and read in the source for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from npusim.errors import UnmodelledCallError


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How one version of xlite allocates. The defaults are those of 0.1.0rc11."""

    version: str
    token_check: str
    """Place of the check of batched tokens, which opens its message."""

    bits_round_up: bool = False
    """A tensor of single bits (routing) is rounded up to whole bytes before alignment, not down."""
    pads_max_m: bool = False
    """``max_m`` is rounded up to a multiple of TP."""
    decode_run: bool = False
    """The dummy run also decodes ``max_batch_size`` requests, in the same pool."""
    block_tables_overrun: bool = True
    """The dummy run fills a block table sized for ``max_seq_len`` with the blocks of max(max_m, max_seq_len) tokens."""

    xccl_per_group: bool = False
    """XCCL is decided for TP and DP each, not for all ranks at once."""
    reads_active_tokens_ratio: bool = False
    """XLITE_ACTIVE_TOKENS_RATIO_PER_EP shrinks the rows kept for this rank's experts."""
    graph_comm: bool = False
    """DP collectives without XCCL run as captured graphs over buffers of their own."""
    packed_gather_bits: int = 64
    """Width of the integer that holds the size of the packed DP all-gather."""
    embeds_into_view: bool = False
    """In the communication-optimised path the embedding is reduced through a view of its tensor."""
    writes_callers_output: bool = False
    """The communication-optimised path works in the caller's output tensor where no padding is needed."""

    packed_qk_variance: bool = False
    """The two variances of ``qk_norm_full`` lie in one tensor from the start."""
    absorbed_mla: bool = False
    """MLA multiplies the up-projections into query and output, and attends to the latent keys."""
    gathers_sparse_keys: bool = False
    """DSA keeps its indices outside the pool, and copies the chosen keys together where requests are short."""

    position_buffer: bool = True
    """The runtime keeps a position buffer of its own."""
    min_identity_indices: int = 0
    """Least length of the identity index table."""
    sync_bytes: int = 25
    """Bytes behind the words on which cores wait for each other."""


_RC11 = Behaviour(
    version="0.1.0rc11",
    token_check="runtime.cpp:389",
    packed_gather_bits=32,
    embeds_into_view=True,
    writes_callers_output=True,
)
_020_RC0 = Behaviour(
    version="0.2.0rc0",
    token_check="runtime.cpp:475",
    bits_round_up=True,
    pads_max_m=True,
    xccl_per_group=True,
    reads_active_tokens_ratio=True,
    graph_comm=True,
    packed_qk_variance=True,
    absorbed_mla=True,
)
_020_RC4 = replace(
    _020_RC0,
    version="0.2.0rc4",
    token_check="runtime.cpp:712",
    decode_run=True,
    block_tables_overrun=False,
    gathers_sparse_keys=True,
    position_buffer=False,
    min_identity_indices=102_400,
    sync_bytes=200,
)

DEFAULT_VERSION: Final = _RC11.version
"""The version imitated unless another is asked for: the pin of vllm-ascend when PR #11380 was merged."""

VERSIONS: Final = {
    "0.1.0rc11": _RC11,
    "0.1.0rc11.dev210": replace(_RC11, version="0.1.0rc11.dev210"),
    "0.2.0rc0": _020_RC0,
    "0.2.0rc4": _020_RC4,
}


def behaviour_of(version: str) -> Behaviour:
    """The behaviour of a version of xlite.

    Raises:
        UnmodelledCallError: The version is none of :data:`VERSIONS`.
    """
    if version not in VERSIONS:
        raise UnmodelledCallError(f"xlite {version!r} is not modelled; modelled are {', '.join(VERSIONS)}")
    return VERSIONS[version]

"""The model as the runner sees it when xlite is on: xlite, and the model itself for what xlite does not run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from xlite._C import AttnMeta, Runtime

from xlite_runner.acl_graph import ACLGraphWrapper
from xlite_runner.adapters import XliteModel, get_adapter
from xlite_runner.config import ProfilePolicy, RunnerConfig
from xlite_runner.dispatch import Dispatcher, Route, first_metadata
from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.attention_metadata import AscendMetadata
from xlite_runner.models.decoder import CausalLM
from xlite_runner.parallel_state import ParallelState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What vllm-ascend PR #11380 changed in the wrapper.

    Attributes:
        skips_profile_run: In full mode a profile run executes nothing.
        tells_moe_sizes: The runtime learns over how many ranks experts are spread, so that it opens their communicator.
        forwards_kwargs: Further keyword arguments go to the model; before, they were refused.
    """

    skips_profile_run: bool
    tells_moe_sizes: bool
    forwards_kwargs: bool


REVISIONS: Mapping[ProfilePolicy, Revision] = {
    ProfilePolicy.RUNNABLE: Revision(skips_profile_run=False, tells_moe_sizes=False, forwards_kwargs=False),
    ProfilePolicy.SKIP: Revision(skips_profile_run=True, tells_moe_sizes=True, forwards_kwargs=True),
    ProfilePolicy.AUDITED: Revision(skips_profile_run=True, tells_moe_sizes=True, forwards_kwargs=True),
}


class XliteWrapper:
    """A model of which xlite executes what it can.

    In decode-only mode it stands before the wrapper that captures the model: what xlite executes is not captured.

    Before PR #11380 the runtime was made before the adapter. That made no difference: with size 0 it touches no device.

    Args:
        runnable: The loaded model, perhaps wrapped for capture.
        config: The engine's configuration.
        parallel: This rank's process groups.
        device: This rank's device.
        policy: What a profile run executes.

    Attributes:
        pool_size_mb: xlite's tensor pool, in units of 2^20 bytes.
        hidden_states: xlite's output, [max_num_batched_tokens, hidden size].

    Raises:
        ValueError: xlite does not support the architecture, or cannot get its pool; upstream's texts.
    """

    def __init__(
        self,
        runnable: CausalLM | ACLGraphWrapper,
        config: RunnerConfig,
        parallel: ParallelState,
        device: torch.device,
        policy: ProfilePolicy,
    ) -> None:
        self.runnable = runnable
        self.revision = REVISIONS[policy]
        self.adapter: XliteModel = get_adapter(config.model.architecture)(
            self.unwrap(), config, parallel.world.rank_in_group
        )
        self.dispatcher = Dispatcher(
            full_mode=config.ascend.xlite_graph_config.full_mode,
            data_parallel_size=config.parallel.data_parallel_size,
            metadata_type=self.adapter.attn_metadata_type,
            skips_profile_run=self.revision.skips_profile_run,
        )
        self.runtime = make_runtime(self.revision, self.adapter.config_values, parallel)
        self.pool_size_mb: int = self.adapter.native.get_tensor_pool_size()
        if parallel.rank == 0:
            logger.info("xlite runtime pool size: %s MB", self.pool_size_mb)
        if self.runtime.init_tensor_pool(self.pool_size_mb) != 0:
            raise ValueError(f"xlite wrapper init failed! runtime pool size: {self.pool_size_mb} MB")
        self.hidden_states = torch.empty(
            config.scheduler.max_num_batched_tokens,
            config.model.hidden_size,
            dtype=self.adapter.freqs_cis.dtype,
            device=device,
        )
        self.kv_caches: Sequence[Sequence[torch.Tensor]] = ()

    def unwrap(self) -> CausalLM:
        """The model itself, without wrappers."""
        return self.runnable.unwrap() if isinstance(self.runnable, ACLGraphWrapper) else self.runnable

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits by the model's own output projection; xlite has no part in it."""
        return self.runnable.compute_logits(hidden_states)

    def register_kv_caches(self, kv_caches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Tell xlite where the KV cache is: per layer, keys and values."""
        self.kv_caches = kv_caches

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext, **model_kwargs: Any
    ) -> torch.Tensor:
        """Hidden states of the batch; after a skipped profile run, of ``max_num_batched_tokens`` rows without meaning.

        Raises:
            TypeError: Keyword arguments that the wrapper's revision does not forward.
        """
        if model_kwargs and not self.revision.forwards_kwargs:
            raise TypeError(f"XliteWrapper.__call__() got an unexpected keyword argument {next(iter(model_kwargs))!r}")
        route = self.dispatcher.route(context)
        if route is Route.HIDDEN_STATES:
            return self.hidden_states
        if route is Route.RUNNABLE:
            hidden_states: torch.Tensor = self.runnable(input_ids, positions, context, **model_kwargs)
            return hidden_states
        return self._forward_xlite(input_ids, positions, context)

    def _forward_xlite(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        metadata = first_metadata(context.attn_metadata)
        assert isinstance(metadata, AscendMetadata)
        output = self.hidden_states[: context.batch_descriptor.num_tokens]
        self.adapter.native.forward(
            self.runtime,
            input_ids,
            make_attn_meta(metadata, positions),
            self.kv_caches,
            self.adapter.freqs_cis,
            output,
            torch_npu.npu.current_stream().npu_stream,
        )
        return output[: metadata.num_actual_tokens]


def make_runtime(revision: Revision, config_values: Mapping[str, Any], parallel: ParallelState) -> Runtime:
    """The runtime of xlite for this rank, without its pool yet."""
    tp_size, dp_size = config_values["def_tp_size"], config_values["def_dp_size"]
    rank = parallel.world.rank_in_group
    if not revision.tells_moe_sizes:
        return Runtime(parallel.local_rank, 0, rank, tp_size, dp_size)
    return Runtime(
        devid=parallel.local_rank,
        size=0,
        rank=rank,
        tp_size=tp_size,
        dp_size=dp_size,
        moe_tp_size=config_values["moe_tp_size"],
        moe_ep_size=config_values["moe_ep_size"],
    )


def make_attn_meta(metadata: AscendMetadata, positions: torch.Tensor) -> AttnMeta:
    """The batch in xlite's terms: new and cached tokens of each request, block tables, positions."""
    ends = metadata.actual_seq_lengths_q
    lens = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    attn_meta = AttnMeta()
    attn_meta.lens = lens
    attn_meta.cached_lens = [max(seq_len - new, 0) for seq_len, new in zip(metadata.seq_lens_list, lens, strict=True)]
    attn_meta.block_tables_cpu = metadata.block_tables.tolist()
    attn_meta.positions = positions
    return attn_meta

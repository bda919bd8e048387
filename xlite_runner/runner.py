"""The model runner: builds the model, takes it through dummy steps, and holds its KV cache."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import nn

from xlite_runner.acl_graph import ACLGraphWrapper
from xlite_runner.batch_execution import BatchExecution, BatchExecutionPlanner
from xlite_runner.config import CUDAGraphMode, ProfilePolicy, RunnerConfig
from xlite_runner.cudagraph_dispatcher import CudagraphDispatcher
from xlite_runner.forward_context import (
    AscendDeviceType,
    BatchDescriptor,
    ForwardContext,
    MoECommType,
    create_forward_context,
    mc2_tokens_capacity,
    select_moe_comm_method,
)
from xlite_runner.graph_capture import GraphRunner
from xlite_runner.input_buffers import InputBuffers
from xlite_runner.kv_cache.allocation import KVCaches, allocate_kv_caches, bind_kv_caches
from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.kv_cache.specs import KVCacheSpec
from xlite_runner.memory_profiling import DeviceMemoryProfiler
from xlite_runner.models.attention import KERNEL_BLOCK_SIZE, Attention
from xlite_runner.models.attention_metadata import AscendAttentionMetadataBuilder, AscendAttentionState, AscendMetadata
from xlite_runner.models.loader import build_model
from xlite_runner.models.rotary import RotaryEmbedding
from xlite_runner.serving.worker.mtp_proposer import MtpProposer
from xlite_runner.serving.worker.step_runner import StepRunner

if TYPE_CHECKING:
    from xlite_runner.parallel_state import ParallelState

logger = logging.getLogger(__name__)


class NPUModelRunner:
    """Runs the model by itself (xlite off).

    Args:
        config: The engine's configuration.
        parallel: This rank's process groups.
        device: This rank's device.

    Attributes:
        model: What a step calls: the model, perhaps wrapped.
        acl_graph: The wrapper that captures the model; only there if the configuration has full graphs.
        model_memory_usage: Bytes that loading the weights left allocated.
        kv_caches: Filled by :meth:`initialize_kv_cache`.
        graphs: Captures its decode steps.
        steps: Executes the scheduler's steps.
    """

    def __init__(self, config: RunnerConfig, parallel: ParallelState, device: torch.device) -> None:
        self.config = config
        self.parallel = parallel
        self.device = device
        self.device_type = AscendDeviceType.of(torch_npu.npu.get_soc_version())
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.buffers = InputBuffers(config, device)
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.batch_execution = BatchExecutionPlanner(config, parallel, self.cudagraph_dispatcher)
        self.metadata_builder = AscendAttentionMetadataBuilder(device)
        self.drafter = MtpProposer(config, device) if config.speculative is not None else None
        self.model: Any = None
        self.acl_graph: ACLGraphWrapper
        self.model_memory_usage = 0
        self.kv_caches: KVCaches = []
        self.graphs = GraphRunner(self)
        self.steps = StepRunner(self)

    @property
    def xlite_pool_mb(self) -> int | None:
        """Megabytes (2^20) of xlite's tensor pool; None without xlite."""
        return None

    # ---- loading

    def load_model(self) -> None:
        """Build the model with dummy weights, metering their memory, and wrap it if decode steps are to be captured."""
        logger.info("Starting to load model %s...", self.config.model.architecture)
        with DeviceMemoryProfiler(self.device) as meter:
            self.model = build_model(self.config, self.parallel, self.device)
            if self.drafter is not None:
                self.drafter.load_model(self.model)
        self.model_memory_usage = meter.consumed_memory
        logger.info("Loading model weights took %.4f GB", meter.consumed_memory / (1 << 30))
        if self.config.compilation.cudagraph_mode.has_full_cudagraphs:
            self.model = self.acl_graph = ACLGraphWrapper(self.model)

    def get_model(self) -> nn.Module:
        """The model itself, without wrappers."""
        model: nn.Module = self.model.unwrap() if isinstance(self.model, ACLGraphWrapper) else self.model
        return model

    @cached_property
    def attention_layers(self) -> Mapping[str, Attention]:
        """The loaded model's attention layers by name, and behind them the drafter's."""
        modules = chain(self.get_model().modules(), self.drafter.modules() if self.drafter is not None else ())
        return {module.layer_name: module for module in modules if isinstance(module, Attention)}

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """What the cache of each attention layer needs, by layer name."""
        return {name: layer.kv_cache_spec for name, layer in self.attention_layers.items()}

    # ---- profiling

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Take the model through the largest step it can get, so that memory peaks where serving would peak.

        Before that, where MC2 operators serve small steps but not the largest, one small step makes their window.
        """
        max_num_tokens = self.config.scheduler.max_num_batched_tokens
        capacity = mc2_tokens_capacity(self.config)
        if (
            max_num_tokens > capacity
            and select_moe_comm_method(capacity, self.config, self.device_type) is MoECommType.MC2
        ):
            self._dummy_run(capacity, is_profile=True)
        hidden_states = self._dummy_run(max_num_tokens, is_profile=True)
        output = self._dummy_sampler_run(hidden_states)
        torch_npu.npu.synchronize()
        del hidden_states, output
        gc.collect()

    @torch.inference_mode()
    def _dummy_run(
        self,
        num_tokens: int,
        *,
        cudagraph_runtime_mode: CUDAGraphMode | None = None,
        force_attention: bool = False,
        uniform_decode: bool = False,
        is_profile: bool = False,
        profile_seq_lens: int | None = None,
    ) -> torch.Tensor:
        """One step of ``num_tokens`` tokens without meaning; returns the hidden states.

        Args:
            num_tokens: Spread evenly over as many requests as there can be.
            cudagraph_runtime_mode: NONE for an eager step; by default whatever the dispatcher says.
            force_attention: Compute attention in an eager step, too.
            uniform_decode: Each request brings the tokens of one decode step.
            is_profile: The memory profile is being taken: eager, and attention is not computed.
            profile_seq_lens: Length of the sequences for attention; by default nothing is cached.

        Raises:
            ValueError: The dispatcher says otherwise than ``cudagraph_runtime_mode``; upstream's text.
        """
        execution = self.batch_execution.plan(
            num_tokens,
            uniform_decode=uniform_decode,
            force_eager=is_profile or cudagraph_runtime_mode is CUDAGraphMode.NONE,
        )
        mode, descriptor = execution.mode, execution.descriptor
        if cudagraph_runtime_mode not in (None, mode):
            raise ValueError(
                "Cudagraph runtime mode mismatch in dummy_run. "
                f"Expected {mode.name}, but got {cudagraph_runtime_mode.name}."
            )
        metadata = None
        if self._should_build_dummy_attn_metadata(
            force_attention=force_attention, is_profile=is_profile, cudagraph_runtime_mode=mode
        ):
            query_len = self.config.uniform_decode_query_len if uniform_decode else None
            metadata = self._dummy_attn_metadata(num_tokens, query_len, descriptor, profile_seq_lens)
        context = self.make_context(execution, metadata, is_profile=is_profile)
        hidden_states = self.forward(context)
        if self.drafter is not None:
            self.drafter.dummy_run(context)
        return hidden_states

    @torch.inference_mode()
    def run_fallback(self, num_tokens: int, *, foreign_metadata: bool) -> None:
        """A dummy step without attention metadata, or with another backend's before its own."""
        descriptor = BatchDescriptor(num_tokens)
        metadata: dict[str, object] | None = None
        if foreign_metadata:
            own = self._dummy_attn_metadata(num_tokens, None, descriptor, None)
            metadata = {"layer of another backend": object(), **own}
        execution = BatchExecution(CUDAGraphMode.NONE, descriptor, num_tokens)
        self.forward(self.make_context(execution, metadata))

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Run the model on what the buffers hold; returns the hidden states."""
        num_tokens = context.batch_descriptor.num_tokens
        input_ids, positions = self.buffers.input_ids[:num_tokens], self.buffers.positions[:num_tokens]
        hidden_states: torch.Tensor = self.model(input_ids, positions, context)
        return hidden_states

    def make_context(
        self,
        execution: BatchExecution,
        metadata: object | None,
        *,
        num_actual_tokens: int | None = None,
        is_profile: bool = False,
    ) -> ForwardContext:
        """The context of a step, whose positions are looked up here.

        Args:
            execution: How it is executed, and its shape with padding.
            metadata: Attention metadata by layer name; None if attention is not computed.
            num_actual_tokens: Tokens without padding; all if None.
            is_profile: The memory profile is being taken.
        """
        positions = self.buffers.positions[: execution.descriptor.num_tokens]
        cos, sin = None, None
        if self._rotary_table is not None:
            cos, sin = self.buffers.cos_sin.update(self._rotary_table, positions)
        return create_forward_context(
            self.config,
            self.device_type,
            execution.descriptor,
            num_actual_tokens=num_actual_tokens,
            max_tokens_across_dp=execution.max_tokens_across_dp,
            attn_metadata=metadata,
            in_profile_run=is_profile,
            cudagraph_runtime_mode=execution.mode,
            reserved_mc2_mask=self.buffers.mc2_mask,
            cos=cos,
            sin=sin,
        )

    def make_draft_context(self, target: ForwardContext, metadata: object, num_tokens: int) -> ForwardContext:
        """The context of the drafter's pass after a step: eager, without padding.

        Args:
            target: The step's context.
            metadata: Attention metadata by layer name.
            num_tokens: Of the step.
        """
        alone = self.config.parallel.data_parallel_size == 1
        return create_forward_context(
            self.config,
            self.device_type,
            BatchDescriptor(num_tokens),
            max_tokens_across_dp=num_tokens if alone else target.max_tokens_across_dp,
            attn_metadata=metadata,
            reserved_mc2_mask=self.buffers.mc2_mask,
            cos=None if target.cos is None else target.cos[:, :num_tokens],
            sin=None if target.sin is None else target.sin[:, :num_tokens],
        )

    @cached_property
    def _rotary_table(self) -> torch.Tensor | None:
        embeddings = (module for module in self.get_model().modules() if isinstance(module, RotaryEmbedding))
        embedding = next(embeddings)
        return embedding.cos_sin_cache if embedding.uses_rows_of_batch else None

    def _should_build_dummy_attn_metadata(
        self, *, force_attention: bool, is_profile: bool, cudagraph_runtime_mode: CUDAGraphMode
    ) -> bool:
        del is_profile
        return force_attention or cudagraph_runtime_mode is CUDAGraphMode.FULL

    def _dummy_attn_metadata(
        self, num_tokens: int, query_len: int | None, descriptor: BatchDescriptor, seq_len: int | None
    ) -> dict[str, AscendMetadata]:
        """Metadata of a dummy step; upstream calls it a decode step whatever it is.

        Args:
            num_tokens: Tokens without padding.
            query_len: New tokens of each request of a decode step; None for a step of other requests.
            descriptor: Shape with padding. Requests that are padding have new tokens, but no sequence.
            seq_len: Length of all sequences; by default as many tokens as are new.
        """
        if query_len is None:
            query_lens = _even_shares(num_tokens, min(num_tokens, self.config.scheduler.max_num_seqs))
        else:
            query_lens = [min(query_len, num_tokens - start) for start in range(0, num_tokens, query_len)]
        num_reqs = len(query_lens)
        num_padding_reqs = max((descriptor.num_reqs or 0) - num_reqs, 0)
        block_tables = self.buffers.batch.block_table[: num_reqs + num_padding_reqs]
        slot_mapping = self.buffers.batch.slot_mapping[: descriptor.num_tokens]
        if num_padding_reqs:
            block_tables[num_reqs:].fill_(0)
            slot_mapping[num_tokens:].fill_(-1)
        metadata = self.metadata_builder.build(
            attn_state=self._dummy_attn_state,
            query_lens=query_lens + [self.config.uniform_decode_query_len] * num_padding_reqs,
            seq_lens=[seq_len or query_len or num_tokens] * num_reqs + [0] * num_padding_reqs,
            num_actual_tokens=num_tokens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
        )
        return dict.fromkeys(self.attention_layers, metadata)

    @property
    def _dummy_attn_state(self) -> AscendAttentionState:
        # With speculation, upstream's special state is for models with latent attention, which there are none of here.
        speculates = self.config.speculative is not None
        return AscendAttentionState.CHUNKED_PREFILL if speculates else AscendAttentionState.DECODE_ONLY

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of one token of each request. Upstream's Ascend runner does not run the sampler here either."""
        scheduler = self.config.scheduler
        shares = _even_shares(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        last = torch.tensor(shares, dtype=torch.int64, device="cpu").cumsum(0) - 1
        selected = hidden_states[last.to(self.device)]
        logits: torch.Tensor = self.get_model().compute_logits(selected)  # type: ignore[operator]
        return logits

    # ---- after profiling

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache of a plan, and hand it to the attention layers.

        Raises:
            ValueError: The attention kernels cannot be used with its block size; upstream's text.
            torch.OutOfMemoryError: It does not fit.
        """
        block_size = self.config.cache.block_size
        if block_size % KERNEL_BLOCK_SIZE:
            raise ValueError(f"No common block size for {block_size}. ")
        with torch.inference_mode():
            self.kv_caches = allocate_kv_caches(
                kv_cache_config,
                self.dtype,
                self.device,
                aligned_for_transfer=self.config.cache.aligned_for_transfer,
            )
        bind_kv_caches(kv_cache_config, self.kv_caches, self.attention_layers)

    def drop_kv_cache(self) -> None:
        """Let go of the KV cache."""
        self.kv_caches.clear()
        for layer in self.attention_layers.values():
            layer.kv_cache = None


class XliteModelRunner(NPUModelRunner):
    """Runs the model through xlite, keeping the model itself for what xlite does not run.

    Args:
        config: The engine's configuration.
        parallel: This rank's process groups.
        device: This rank's device.
        policy: What the profile run executes in full mode.
    """

    def __init__(
        self, config: RunnerConfig, parallel: ParallelState, device: torch.device, policy: ProfilePolicy
    ) -> None:
        super().__init__(config, parallel, device)
        self.policy = policy

    def load_model(self) -> None:
        """Load the model, then hand its weights to xlite."""
        from xlite_runner.wrapper import XliteWrapper

        super().load_model()
        self.model = XliteWrapper(self.model, self.config, self.parallel, self.device, self.policy)

    @property
    def xlite_pool_mb(self) -> int | None:
        """Megabytes (2^20) of xlite's tensor pool."""
        pool_mb: int = self.model.pool_size_mb
        return pool_mb

    def get_model(self) -> nn.Module:
        """The model itself, also once it is wrapped."""
        model: nn.Module = self.model.unwrap()
        return model

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and register it with xlite."""
        super().initialize_kv_cache(kv_cache_config)
        self.model.register_kv_caches(self.kv_caches)  # a drafter's layer is behind those that xlite knows of

    def drop_kv_cache(self) -> None:
        """Let go of the KV cache, xlite too."""
        super().drop_kv_cache()
        self.model.register_kv_caches(())

    def _should_build_dummy_attn_metadata(
        self, *, force_attention: bool, is_profile: bool, cudagraph_runtime_mode: CUDAGraphMode
    ) -> bool:
        # Always outside profiling, so that data-parallel ranks without requests take part in xlite's steps.
        base = super()._should_build_dummy_attn_metadata(
            force_attention=force_attention, is_profile=is_profile, cudagraph_runtime_mode=cudagraph_runtime_mode
        )
        return base or not is_profile


def _even_shares(total: int, num_shares: int) -> list[int]:
    """``total`` in equal whole shares, the last one with the rest."""
    share = total // num_shares
    return [share] * (num_shares - 1) + [total - share * (num_shares - 1)]

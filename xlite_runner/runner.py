"""The model runner: builds the model, takes it through dummy steps, and holds its KV cache."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xlite_runner.config import CUDAGraphMode, ProfilePolicy, RunnerConfig
from xlite_runner.forward_context import (
    AscendDeviceType,
    BatchDescriptor,
    ForwardContext,
    MoECommType,
    create_forward_context,
    mc2_tokens_capacity,
    select_moe_comm_method,
)
from xlite_runner.graphs import GraphRunner
from xlite_runner.input_buffers import InputBuffers
from xlite_runner.kv_cache.allocation import KVCaches, allocate_kv_caches
from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.kv_cache.specs import KVCacheSpec
from xlite_runner.memory_profiling import DeviceMemoryProfiler
from xlite_runner.models.attention import AscendAttentionState, AscendMetadata, Attention
from xlite_runner.models.loader import build_model
from xlite_runner.models.rotary import CosSinBuffers

if TYPE_CHECKING:
    from xlite_runner.parallel_state import ParallelState

logger = logging.getLogger(__name__)

KERNEL_BLOCK_SIZE = 128
"""Tokens in a block of the attention kernels, which larger blocks are split into."""


class NPUModelRunner:
    """Runs the model by itself (xlite off).

    Args:
        config: The engine's configuration.
        parallel: This rank's process groups.
        device: This rank's device.

    Attributes:
        model: What a step calls: the model, later perhaps wrapped.
        model_memory_usage: Bytes that loading the weights left allocated.
        kv_caches: Filled by :meth:`initialize_kv_cache`.
    """

    def __init__(self, config: RunnerConfig, parallel: ParallelState, device: torch.device) -> None:
        self.config = config
        self.parallel = parallel
        self.device = device
        self.device_type = AscendDeviceType.of(torch.npu.get_soc_version())
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.buffers = InputBuffers(config, device)
        scheduler = config.scheduler
        self.cos_sin = CosSinBuffers(scheduler.max_num_batched_tokens, config.model.head_dim, self.dtype, device)
        self.mc2_mask: torch.Tensor | None = None
        if config.model.moe is not None:
            self.mc2_mask = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.bool, device=device)
        self.model: Any = None
        self.model_memory_usage = 0
        self.kv_caches: KVCaches = []
        self.graphs = GraphRunner(self)

    @property
    def xlite_pool_mb(self) -> int | None:
        """Megabytes (2^20) of xlite's tensor pool; None without xlite."""
        return None

    # ---- loading

    def load_model(self) -> None:
        """Build the model with dummy weights, metering the memory that they take."""
        logger.info("Starting to load model %s...", self.config.model.architecture)
        with DeviceMemoryProfiler(self.device) as meter:
            self.model = build_model(self.config, self.parallel, self.device)
        self.model_memory_usage = meter.consumed_memory
        logger.info("Loading model weights took %.4f GB", meter.consumed_memory / (1 << 30))

    def get_model(self) -> nn.Module:
        """The model itself, without wrappers."""
        model: nn.Module = self.model
        return model

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """What the cache of each attention layer needs, by layer name."""
        layers = [module for module in self.get_model().modules() if isinstance(module, Attention)]
        return {layer.layer_name: layer.kv_cache_spec for layer in layers}

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
        torch.npu.synchronize()
        del hidden_states, output
        gc.collect()

    @torch.inference_mode()
    def _dummy_run(
        self,
        num_tokens: int,
        *,
        is_profile: bool = False,
        cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> torch.Tensor:
        """One step of ``num_tokens`` tokens without meaning; returns the hidden states.

        Args:
            num_tokens: Spread evenly over as many requests as there can be.
            is_profile: The memory profile is being taken: eager, and attention is not computed.
            cudagraph_mode: Of a step that is captured or replayed.
        """
        num_reqs = min(num_tokens, self.config.scheduler.max_num_seqs)
        uses_graph = cudagraph_mode is not CUDAGraphMode.NONE
        descriptor = BatchDescriptor(num_tokens, num_reqs if uses_graph else None)
        metadata = None
        if self._should_build_dummy_attn_metadata(is_profile=is_profile, cudagraph_mode=cudagraph_mode):
            metadata = self._dummy_attn_metadata(num_tokens, num_reqs)
        input_ids = self.buffers.input_ids[:num_tokens]
        positions = self.buffers.positions[:num_tokens]
        context = self._forward_context(descriptor, positions, metadata, is_profile=is_profile)
        hidden_states: torch.Tensor = self.model(input_ids, positions, context)
        return hidden_states

    def _forward_context(
        self, descriptor: BatchDescriptor, positions: torch.Tensor, metadata: object | None, *, is_profile: bool
    ) -> ForwardContext:
        cos, sin = self.cos_sin.update(self._cos_sin_cache(), positions)
        return create_forward_context(
            self.config,
            self.device_type,
            descriptor,
            attn_metadata=metadata,
            in_profile_run=is_profile,
            reserved_mc2_mask=self.mc2_mask,
            cos=cos,
            sin=sin,
        )

    def _cos_sin_cache(self) -> torch.Tensor:
        return next(
            buffer for name, buffer in self.get_model().named_buffers() if name.rpartition(".")[2] == "cos_sin_cache"
        )

    def _should_build_dummy_attn_metadata(self, *, is_profile: bool, cudagraph_mode: CUDAGraphMode) -> bool:
        del is_profile
        return cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY

    def _dummy_attn_metadata(self, num_tokens: int, num_reqs: int) -> dict[str, AscendMetadata]:
        """Metadata of a step in which each request brings its share of the tokens, the rest going to the last."""
        share = num_tokens // num_reqs
        lens = torch.full((num_reqs,), share, dtype=torch.int32)
        lens[-1] += num_tokens - share * num_reqs
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
        starts[1:] = lens.cumsum(0)
        is_decode = num_tokens == num_reqs * self.config.uniform_decode_query_len
        metadata = AscendMetadata(
            attn_state=AscendAttentionState.DECODE_ONLY if is_decode else AscendAttentionState.CHUNKED_PREFILL,
            num_actual_tokens=num_tokens,
            query_start_loc=starts,
            seq_lens_cpu=lens,
            block_tables=self.buffers.block_table[:num_reqs],
        )
        return dict.fromkeys(self.get_kv_cache_spec(), metadata)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of one token of each request. Upstream's Ascend runner does not run the sampler here either."""
        num_reqs = self.config.scheduler.max_num_seqs
        num_tokens = self.config.scheduler.max_num_batched_tokens
        num_reqs = min(num_reqs, num_tokens)
        share = num_tokens // num_reqs
        last = torch.arange(1, num_reqs + 1, dtype=torch.int64) * share - 1
        last[-1] = num_tokens - 1
        selected = hidden_states[last.to(self.device)]
        logits: torch.Tensor = self.get_model().compute_logits(selected)  # type: ignore[operator]
        return logits

    # ---- after profiling

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache of a plan.

        Raises:
            ValueError: The attention kernels cannot be used with its block size; upstream's text.
            torch.OutOfMemoryError: It does not fit.
        """
        block_size = self.config.cache.block_size
        if block_size % KERNEL_BLOCK_SIZE:
            raise ValueError(f"No common block size for {block_size}. ")
        with torch.inference_mode():
            self.kv_caches = allocate_kv_caches(kv_cache_config, self.dtype, self.device)

    def drop_kv_cache(self) -> None:
        """Let go of the KV cache."""
        self.kv_caches.clear()


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
        self.model.register_kv_caches(self.kv_caches)

    def _should_build_dummy_attn_metadata(self, *, is_profile: bool, cudagraph_mode: CUDAGraphMode) -> bool:
        # Always outside profiling, so that data-parallel ranks without requests take part in xlite's steps.
        base = super()._should_build_dummy_attn_metadata(is_profile=is_profile, cudagraph_mode=cudagraph_mode)
        return base or not is_profile

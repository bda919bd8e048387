"""From a configuration to a model with weights on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
import torch_npu

from xlite_runner.config import RunnerConfig
from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.models.attention import Attention
from xlite_runner.models.decoder import CausalLM
from xlite_runner.models.dense import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from xlite_runner.models.layers import BuildContext, LinearBase
from xlite_runner.models.mtp import MiMoMTP, MultiTokenPredictor
from xlite_runner.models.qwen3_moe import Qwen3MoeForCausalLM
from xlite_runner.moe.fused_moe import FusedMoE
from xlite_runner.parallel_state import ParallelState

MODELS: Mapping[str, Callable[[BuildContext], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
"""Model classes by the architecture's name in ``config.json``."""

DUMMY_WEIGHT_RANGE = 1e-3
DUMMY_WEIGHT_SEED = 1234


def build_model(config: RunnerConfig, parallel: ParallelState, device: torch.device) -> CausalLM:
    """The configured model with dummy weights, ready to run.

    Weights are made where they stay; the only temporaries are one transposed copy of an expert tensor at a time and
    those of the rotary cache.

    Raises:
        ModuleNotFoundError: See :func:`enable_custom_op`.
    """
    enable_custom_op()
    device_type = AscendDeviceType.of(torch_npu.npu.get_soc_version())
    model = MODELS[config.model.architecture](BuildContext(config, parallel, device, device_type))
    _load(model)
    return model


def build_mtp(target: CausalLM) -> MiMoMTP | MultiTokenPredictor:
    """The module that drafts for a target model, with dummy weights, ready to run."""
    module_class = MiMoMTP if isinstance(target, Qwen2ForCausalLM) else MultiTokenPredictor
    module = module_class(target.build, target)
    _load(module)
    return module


def _load(model: torch.nn.Module) -> None:
    initialize_dummy_weights(model)
    for module in model.modules():
        if isinstance(module, (LinearBase, FusedMoE)):
            module.process_weights_after_loading()
    for module in model.modules():
        if isinstance(module, Attention):
            module.process_weights_after_loading()
    model.eval()


def enable_custom_op() -> None:
    """Load vllm-ascend's compiled operators, unless ``torch.ops._C_ascend`` has them already.

    Raises:
        ModuleNotFoundError: vllm-ascend is not installed.
    """
    if not hasattr(torch.ops._C_ascend, "npu_add_rms_norm_bias"):
        importlib.import_module("vllm_ascend.vllm_ascend_C")


def initialize_dummy_weights(model: torch.nn.Module) -> None:
    """Small random numbers in every weight, in place; the device's default generator is not drawn from."""
    for parameter in model.parameters():
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(DUMMY_WEIGHT_SEED)
        parameter.data.uniform_(-DUMMY_WEIGHT_RANGE, DUMMY_WEIGHT_RANGE, generator=generator)

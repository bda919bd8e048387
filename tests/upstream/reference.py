"""A tiny model by transformers' code, on the host: weights for upstream to load, and an oracle of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_weights(folder: Path, seed: int = 0, layer_scale: float = 1.0) -> None:
    """Put random weights beside a model's ``config.json``: logits then have a deviation of 1.

    Args:
        folder: Where the model is.
        seed: Of the numbers.
        layer_scale: What layers add is multiplied by this; with little of it a token follows from the one before.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = layer_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(std=scale * parameter.shape[-1] ** -0.5, generator=generator)
    config_text = (folder / "config.json").read_text(encoding="utf-8")
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config_text, encoding="utf-8")


def write_drafter_weights(model: Path, drafter: Path) -> None:
    """Weights for MiMo's module that often guess right what :func:`write_weights` wrote with a small layer scale.

    The module passes a token's embedding on and has the model's first layer, last norm and output projection.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    hidden_size = weights["model.norm.weight"].shape[0]
    ones = torch.ones_like(weights["model.norm.weight"])
    layer, module = "model.layers.0.", "model.mtp_layers.0."
    drafted = {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    drafted |= {module + name.removeprefix(layer): weights[name] for name in weights if name.startswith(layer)}
    drafted |= {f"{module}{name}_layernorm.weight": ones.clone() for name in ("token", "hidden")}
    drafted[f"{module}final_layernorm.weight"] = weights["model.norm.weight"]
    of_states_and_embeddings = (torch.zeros(hidden_size, hidden_size), torch.eye(hidden_size))
    drafted[f"{module}input_proj.weight"] = torch.cat(of_states_and_embeddings, dim=1).to(ones.dtype)
    save_file(drafted, drafter / "model.safetensors", metadata={"format": "pt"})


def shortfalls(folder: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[list[float]]:
    """By how much the logit of each output token is below the largest one, given all tokens before it."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1))[:, 0]
        answers.append((logits.amax(1) - chosen).tolist())
    return answers

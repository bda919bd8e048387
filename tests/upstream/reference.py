"""A tiny model by transformers' code, on the host: weights for upstream to load, and an oracle of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_weights(folder: Path, seed: int = 0) -> None:
    """Put random weights beside a model's ``config.json``: logits then have a deviation of 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    config_text = (folder / "config.json").read_text(encoding="utf-8")
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config_text, encoding="utf-8")


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

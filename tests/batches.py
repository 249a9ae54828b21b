"""Ragged rollouts with every peculiarity, and what a model says of their rows one at a time, unpadded: the definition to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf import Rewards, Rollout, Status
from tests.models import VOCABULARY


def ragged_rollout(
    *,
    seed: int = 0,
    prompts: int = 3,
    n: int = 3,
    longest: int = 9,
    temperature: float | Sequence[float] = 1.0,
    tools: bool = True,
    **fields: Any,
) -> Rollout:
    """prompts × n responses of 1 to `longest` tokens behind prompts of 1 to 7; with `tools` some tokens were not sampled.

    Every row samples its first token at least, so that each can be trained on.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (int(torch.randint(low, high + 1, (1,), generator=generator)),), generator=generator)

    questions = [ids(1, 7) for _ in range(prompts)]
    responses = [ids(1, longest) for _ in range(prompts * n)]
    masks = [torch.rand(len(response), generator=generator) > (0.25 if tools else -1) for response in responses]
    for mask in masks:
        mask[0] = True
    return Rollout.build(
        [question for question in questions for _ in range(n)],
        responses,
        response_masks=masks,
        group=[i for i in range(prompts) for _ in range(n)],
        temperature=temperature,
        **fields,
    )


def plain_statistics(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """log-probabilities and entropies [B, T] from `model(ids).logits` of one unpadded row at a time, differentiable; 0 off the mask."""
    logprobs, entropies = [], []
    for i in range(len(rollout)):
        length, start = int(rollout.lengths[i]), len(rollout.prompt_ids[i])
        response = rollout.response_ids[i, :length]
        logits = model(input_ids=torch.cat([rollout.prompt_ids[i], response])[None], use_cache=False).logits[0]
        temperature = float(rollout.temperature[i]) or 1.0
        log_p = torch.log_softmax(logits[start - 1 : start - 1 + length] / temperature, -1)
        width = (0, rollout.response_ids.shape[1] - length)
        mask = rollout.response_mask[i, :length]
        logprobs.append(torch.nn.functional.pad(torch.where(mask, log_p.gather(-1, response[:, None])[:, 0], 0), width))
        entropies.append(torch.nn.functional.pad(torch.where(mask, -(log_p.exp() * log_p).sum(-1), 0), width))
    return torch.stack(logprobs), torch.stack(entropies)


def with_exact_norms(model: Any) -> Any:
    """Let the RMS norms of a float64 model compute in float64; transformers runs them in float32 whatever the model."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            shift = 1.0 if "Gemma" in type(module).__name__ else 0.0
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon

            def forward(hidden: Tensor, module: Any = module, shift: float = shift, eps: float = eps) -> Tensor:
                return (module.weight + shift) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)

            module.forward = forward
    return model


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name."""
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


def rewards_of(scores: Sequence[float | None], token_scores: Tensor | None = None) -> Rewards:
    """Rewards from plain numbers; None is an ERROR."""
    values = torch.tensor([float("nan") if score is None else score for score in scores], dtype=torch.float32)
    return Rewards(values, [Status.ERROR if score is None else Status.OK for score in scores], token_scores=token_scores)

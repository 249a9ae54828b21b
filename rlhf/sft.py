"""Supervised fine-tuning: the same actor and learner under another loss.

Legend: B examples, T tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from rlhf.errors import ConfigError, DataError
from rlhf.learner import PolicyOutput
from rlhf.parallel import num_processes, own_share
from rlhf.ppo.experience import Experience
from rlhf.ppo.losses import LossOutput, check_aggregation, token_weights
from rlhf.rollout.batch import Rollout


class SupervisedLoss:
    """Negative log-likelihood of the response tokens; the prompt is not learned.

        loss = −Σₜ wₜ log π(yₜ | x, y₁ … yₜ₋₁)

    Args:
        aggregate: how token losses become one number, see `rlhf.ppo.token_weights`; "constant" is not for this loss.

    Raises:
        ConfigError: aggregate is unknown.
    """

    def __init__(self, aggregate: str = "token-mean") -> None:
        check_aggregation(aggregate, None)
        self.aggregate = aggregate

    def __repr__(self) -> str:
        return f"SupervisedLoss(aggregate={self.aggregate!r})"

    def weights(self, mask: Tensor, *, tokens: int | Tensor | None = None, sequences: int | Tensor | None = None) -> Tensor:
        """[B, T] the weight of each token, from the counts of the whole mini-batch."""
        return token_weights(mask, self.aggregate, tokens=tokens, sequences=sequences)

    def __call__(self, policy: PolicyOutput, batch: Experience, weights: Tensor) -> LossOutput:
        """LossOutput with the metrics nll (nats per token) and entropy."""
        counted = weights > 0
        count = counted.sum().clamp(min=1)
        nll = torch.where(counted, -policy.logprobs, 0.0)
        entropy = torch.where(counted, policy.entropy.detach(), 0.0).sum() / count
        return LossOutput((nll * weights).sum(), {"nll": nll.detach().sum() / count, "entropy": entropy})


def supervised_experience(prompts: Sequence[Any], responses: Sequence[str], tokenizer: Any) -> Experience:
    """Examples as an experience: every response ends in the end token, which is learned even where it is the pad token too.

    Args:
        prompts: B texts, chats, token id lists or `Prompt`s.
        responses: B texts, tokenised apart from their prompts.

    Raises:
        DataError: there are no examples.
    """
    if not len(prompts):
        raise DataError("supervised fine-tuning needs at least one example; got none")
    return Experience(rollout=Rollout.from_texts(list(prompts), list(responses), tokenizer))


def train_supervised(
    actor: Any,
    experience: Experience,
    *,
    steps: int,
    batch_size: int,
    seed: int = 0,
    loss: SupervisedLoss | None = None,
    progress: bool = True,
) -> list[dict[str, float]]:
    """Fine-tune `actor` on examples for `steps` optimiser steps of `batch_size` examples, drawn in shuffled passes.

    Several processes are given the same examples and share every batch out among them.

    Returns:
        the metrics of each step: "actor/nll", "actor/grad_norm", ...

    Raises:
        ConfigError: steps below 1, or a batch larger than the data.
    """
    if steps < 1:
        raise ConfigError(f"steps must be at least 1; got {steps}")
    if not num_processes() <= batch_size <= len(experience):
        raise ConfigError(
            f"batch_size must be at least the number of processes ({num_processes()}) and at most that of examples ({len(experience)}); "
            f"got {batch_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    order = torch.empty(0, dtype=torch.int64)
    with tqdm(total=steps, desc="sft", unit="step", disable=not progress) as bar:
        while len(history) < steps:
            if len(order) < batch_size:
                order = torch.cat([order, torch.randperm(len(experience), generator=generator)])
            rows, order = order[:batch_size], order[batch_size:]
            history.append(actor.update(experience.select(own_share(rows.tolist())), SupervisedLoss() if loss is None else loss))
            bar.update()
            bar.set_postfix(nll=f"{history[-1]['actor/nll']:.3f}", refresh=False)
    return history

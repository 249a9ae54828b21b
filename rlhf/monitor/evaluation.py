"""How good is the policy on prompts it is not trained on: named sets, mean score, pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf.errors import ConfigError
from rlhf.parallel import gather_objects, own_share
from rlhf.rollout.sampling import SamplingParams


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Chance that at least one of k responses is right, estimated without bias from `correct` right ones of `total`.

        pass@k = 1 − C(n − c, k) / C(n, k)

    Raises:
        ConfigError: not 0 ≤ correct ≤ total and 1 ≤ k ≤ total.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.

    >>> pass_at_k(1, 4, 4), pass_at_k(1, 4, 1)
    (1.0, 0.25)
    """
    if not (0 <= correct <= total and 1 <= k <= total):
        raise ConfigError(f"pass@k needs 0 <= correct <= total and 1 <= k <= total; got correct={correct}, total={total}, k={k}")
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


@dataclass(frozen=True)
class EvalSet:
    """Prompts to evaluate on.

    Attributes:
        prompts: a `PromptDataset` or a list of prompts; all of them are used.
        reward: judges the responses; the loop's own if None.
        sampling: greedy, one response, if left out. Its `max_new_tokens` should be that of training.
        correct_above: a response is right for pass@k if its score is above this.
    """

    prompts: Sequence[Any]
    reward: Callable[[Any], Any] | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    correct_above: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str):
            raise ConfigError("prompts must be a list of prompts, got one text; put it in a list")
        if not len(self.prompts):
            raise ConfigError("an EvalSet needs at least one prompt; got none")

    def run(self, generate: Callable[[list[Any], SamplingParams], Any], reward: Callable[[Any], Any]) -> dict[str, float]:
        """Sample, judge, and summarise: mean (unscored responses count 0), pass@1..pass@n by powers of two, lengths, rates.

        A reward of several parts also gives the mean of each, unweighted: "part/<name>".

        Several processes evaluate a share of the prompts each; every one of them returns the figures of all.
        """
        prompts = own_share(list(self.prompts))
        parts = gather_objects((len(prompts), self._measure(prompts, generate, reward) if prompts else {}))
        total = sum(count for count, _ in parts)
        names = dict.fromkeys(name for _, metrics in parts for name in metrics)
        return {name: sum(count * metrics[name] for count, metrics in parts if count) / total for name in names}

    def _measure(
        self, prompts: list[Any], generate: Callable[[list[Any], SamplingParams], Any], reward: Callable[[Any], Any]
    ) -> dict[str, float]:
        rollout = generate(prompts, self.sampling)
        rewards = (self.reward or reward)(rollout)
        scores = rewards.scores.nan_to_num(nan=0.0)
        _, group = torch.unique(rollout.group, return_inverse=True)
        totals = torch.bincount(group)
        correct = torch.bincount(group, weights=(scores > self.correct_above).double())
        n = int(totals.min())
        ks = [2**i for i in range(n.bit_length()) if 2**i <= n]
        metrics = {"mean": float(scores.mean())}
        for k in sorted({*ks, n}):
            each = [pass_at_k(int(c), int(t), k) for c, t in zip(correct, totals, strict=True)]
            metrics[f"pass@{k}"] = sum(each) / len(each)
        judged = rewards.metrics()
        if len(rewards.parts) > 1:
            metrics |= {f"part/{name}": float(part.nan_to_num(nan=0.0).mean()) for name, part in rewards.parts.items()}
        return metrics | {
            "response_length": float(rollout.lengths.float().mean()),
            "truncation_rate": float(rollout.truncated.float().mean()),
            "error_rate": judged["reward/error_rate"] + judged["reward/timeout_rate"],
        }

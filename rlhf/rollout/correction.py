"""Importance correction: rows that were sampled with other probabilities than those of the policy being trained.

Legend: B rows, T tokens of the longest response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf.errors import ConfigError, RolloutError, ShapeError, unknown_option
from rlhf.rollout.batch import Rollout

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights each token's loss by how much likelier the policy finds it than the sampler did, cut off from above.

        dₜ = old_logprobs − rollout.logprobs,    wₜ = min(exp(rₜ), cap)

        level         r
        "token"       dₜ, of this token alone: low variance, biased for credit over several tokens
        "sequence"    Σ d over the row's sampled tokens: unbiased without the cap, of a variance that grows with the length
        "geometric"   mean of d over the row's sampled tokens

    Small weights stay as they are: cut off from above only. The weights carry no gradient, and the ratio of PPO is not affected: it
    compares the policy with `old_logprobs`, the weight `old_logprobs` with the sampler. An engine of another precision gives weights near
    1; saved rollouts and other policies give real ones.

    Attributes:
        level: what one weight is made of.
        cap: largest weight; `math.inf` for none.
        reject: leave tokens ("token") or whole rows ("sequence", "geometric") out of the loss whose uncut exp(r) is outside (low, high);
            None keeps all. For rows "geometric" with (0.99, 1.01) is a strict choice. The cap still holds for what is kept.

    Raises:
        ConfigError: an option is unknown or out of range.

    Source: Espeholt et al. 2018, arXiv:1802.01561 (truncated weights); Zheng et al. 2025, arXiv:2507.18071 (geometric mean).

    >>> rollout = Rollout.build([[1]], [[2, 3]], logprobs=[[-1.5, -1.0]])
    >>> weights, kept = ImportanceCorrection(cap=2.0).weights(torch.tensor([[-1.0, 0.0]]), rollout)
    >>> weights, kept
    (tensor([[1.6487, 2.0000]]), tensor([[True, True]]))
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    cap: float = 2.0
    reject: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise unknown_option("level", self.level, LEVELS)
        if not self.cap > 0:
            raise ConfigError(f"cap must be above 0, got {self.cap}; 2.0 is usual, math.inf leaves weights as they are")
        if self.reject is not None:
            low, high = self.reject
            if not 0 <= low < high:
                raise ConfigError(f"reject must be (low, high) with 0 <= low < high, got {self.reject}; weights of 1 mean agreement")

    def weights(self, old_logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Importance weights and what is kept.

        Args:
            old_logprobs: [B, T] of the policy that the update starts from; anything may stand where nothing was sampled.
            rollout: with the sampler's log-probabilities.

        Returns:
            weights float32 [B, T], 1 where nothing was sampled, and kept bool [B, T], True where nothing was sampled.

        Raises:
            RolloutError: the rollout has no log-probabilities.
            ShapeError: old_logprobs has another shape than the rollout.
        """
        if rollout.logprobs is None:
            raise RolloutError(
                "importance correction needs the sampler's log-probabilities; the rollout has none, so leave correction= out"
            )
        if old_logprobs.shape != rollout.response_ids.shape:
            raise ShapeError(f"old_logprobs must be {list(rollout.response_ids.shape)} like the rollout, got {list(old_logprobs.shape)}")
        mask = rollout.response_mask
        differences = torch.where(mask, old_logprobs.detach().double() - rollout.logprobs.double(), 0.0)
        if self.level == "token":
            logratios = differences
        else:
            logratios = differences.sum(1, keepdim=True)
            if self.level == "geometric":
                logratios = logratios / mask.sum(1, keepdim=True).clamp(min=1)
            logratios = torch.where(mask, logratios, 0.0)
        weights = torch.where(mask, logratios.clamp(max=math.log(self.cap)).exp(), 1.0)
        kept = torch.ones_like(mask)
        if self.reject is not None:
            low, high = (math.log(bound) if bound > 0 else -math.inf for bound in self.reject)
            kept = ~mask | ((logratios >= low) & (logratios <= high))
        return weights.float(), kept

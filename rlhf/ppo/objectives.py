"""Losses as objects, for `Actor.update` and `Critic.update`.

A loss is any callable `loss(output, batch, weights) -> LossOutput`; these two hold the options and know which parts of the experience
go where. Write your own in the same form (see `PolicyLoss` for what the optional attributes mean), or give `PolicyLoss` another kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.errors import ConfigError, unknown_option
from rlhf.ppo.advantages import masked_mean
from rlhf.ppo.kl import ESTIMATORS, kl_estimate
from rlhf.ppo.losses import (
    LossOutput,
    check_aggregation,
    check_dual_clip,
    check_value_clip,
    clip_range,
    ppo_clip_loss,
    token_weights,
    value_loss,
)

if TYPE_CHECKING:
    from rlhf.learner import PolicyOutput, ValueOutput
    from rlhf.ppo.experience import Experience

# k1 as a loss has an expected gradient of 0; its value with k2's gradient is fine.
_LOSS_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "k1")


@dataclass(frozen=True)
class PolicyLoss:
    """The policy's loss: a surrogate, minus an entropy bonus, plus KL to the reference.

        loss = Σₜ wₜ (ℓₜ − entropy_coef · Hₜ + kl_coef · KLₜ)

    A group of equal rewards has no advantage, but its tokens still move the policy through the KL and entropy terms. With GRPO at the first
    step the value of ℓ is 0 although its gradient is not: watch grad_norm, not the loss.

    Attributes:
        kind: the surrogate; called like `ppo_clip_loss`.
        clip: half-width of the ratio's range, or (low, high).
        dual_clip: see `ppo_clip_loss`.
        aggregate: how token losses become one number, see `token_weights`.
        constant: the divisor for aggregate="constant".
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the KL to the reference; for KL in the reward see `KLPenalty`.
        kl_estimator: "k3" follows the gradient of KL(reference ‖ policy), "k2" (and "k1+", "k3+" with its gradient) that of
            KL(policy ‖ reference), on-policy. "k1" is refused: its expected gradient is 0.

    Raises:
        ConfigError: an option is unknown, out of range, or of no effect; kl_coef without reference log-probabilities.

    >>> PolicyLoss(clip=(0.2, 0.28), aggregate="sequence-mean", kl_coef=0.01).needs
    frozenset()
    """

    kind: Callable[..., LossOutput] = ppo_clip_loss
    clip: float | tuple[float, float] = 0.2
    dual_clip: float | None = None
    aggregate: str = "token-mean"
    constant: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"

    def __post_init__(self) -> None:
        if not callable(self.kind):
            raise ConfigError(f"kind must be a function like ppo_clip_loss; got {self.kind!r}")
        clip_range(self.clip)
        check_dual_clip(self.dual_clip)
        check_aggregation(self.aggregate, self.constant)
        if not (_is_finite(self.kl_coef) and self.kl_coef >= 0):
            raise ConfigError(
                f"kl_coef must be at least 0 and finite, got {self.kl_coef!r}; a negative one would reward leaving the reference"
            )
        if not _is_finite(self.entropy_coef):
            raise ConfigError(f"entropy_coef must be a finite number, got {self.entropy_coef!r}; 0.0 leaves the bonus out")
        if self.kl_estimator == "k1":
            raise ConfigError(
                "kl_estimator must not be 'k1': logp − ref as a loss has an expected gradient of 0, so it would not hold the policy back; "
                "use 'k3' or 'k2' here, or k1 in the reward: with_advantages(estimator, kl=KLPenalty(coef))"
            )
        if self.kl_estimator not in _LOSS_ESTIMATORS:
            raise unknown_option("kl_estimator", self.kl_estimator, _LOSS_ESTIMATORS, {"mse": "k2", "low_var_kl": "k3"})

    @property
    def needs(self) -> frozenset[str]:
        """What the learner must compute with a gradient besides log-probabilities."""
        return frozenset({"entropy"} if self.entropy_coef else ())

    def weights(self, mask: Tensor, *, tokens: int | Tensor | None = None, sequences: int | Tensor | None = None) -> Tensor:
        """[B, T] the weight of each token, from the counts of the whole mini-batch over all processes."""
        return token_weights(mask, self.aggregate, constant=self.constant, tokens=tokens, sequences=sequences)

    def __call__(self, policy: PolicyOutput, batch: Experience, weights: Tensor) -> LossOutput:
        """The loss of a micro-batch.

        Args:
            policy: logprobs and entropy, both [B, T].
            batch: B rows of experience, on the same device.
            weights: [B, T], above 0 where a token counts.

        Returns:
            LossOutput: the sum of the weighted token losses; metrics of the surrogate, entropy, and kl_loss_term (kl_coef aside).
        """
        if not hasattr(policy, "logprobs"):
            raise ConfigError("PolicyLoss is for an Actor; a Critic minimises ValueLoss()")
        mask = weights > 0
        output = self.kind(
            policy.logprobs,
            _present(batch.old_logprobs, "old_logprobs", "build the experience with make_experience(rollout, rewards, actor=actor)"),
            _present(batch.advantages, "advantages", "call experience.with_advantages(estimator) before the update"),
            mask,
            clip=self.clip,
            weights=weights,
            importance_weights=batch.importance_weights,
            **({} if self.dual_clip is None else {"dual_clip": self.dual_clip}),
        )
        loss, metrics = output.loss, dict(output.metrics)
        if policy.entropy is not None:
            metrics["entropy"] = masked_mean(policy.entropy.detach(), mask)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * _weighted_sum(policy.entropy, mask, weights)
        if self.kl_coef:
            reference = _present(
                batch.ref_logprobs, "ref_logprobs", "pass reference=actor.reference() to make_experience, or set kl_coef=0"
            )
            kl = kl_estimate(policy.logprobs, reference, self.kl_estimator, mask=mask)
            loss = loss + self.kl_coef * _weighted_sum(kl, mask, weights)
            metrics["kl_reference"] = masked_mean(kl.detach(), mask)
        return LossOutput(loss, metrics)


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss.

    Attributes:
        clip: half-width around the values at the start of the update, in units of reward; None for none.
        coef: the factor before the square; 0.5 is the textbook's one half.
        aggregate: how token losses become one number, see `token_weights`.
        constant: the divisor for aggregate="constant".

    Raises:
        ConfigError: an option is unknown, out of range, or of no effect; values or returns are missing from the experience.

    >>> ValueLoss(clip=0.2)
    ValueLoss(clip=0.2, coef=0.5, aggregate='token-mean', constant=None)
    """

    clip: float | None = None
    coef: float = 0.5
    aggregate: str = "token-mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        check_value_clip(self.clip)
        check_aggregation(self.aggregate, self.constant)
        if not (_is_finite(self.coef) and self.coef > 0):
            raise ConfigError(f"coef must be above 0, got {self.coef!r}; 0.5 is usual")

    def weights(self, mask: Tensor, *, tokens: int | Tensor | None = None, sequences: int | Tensor | None = None) -> Tensor:
        """[B, T] the weight of each token, from the counts of the whole mini-batch over all processes."""
        return token_weights(mask, self.aggregate, constant=self.constant, tokens=tokens, sequences=sequences)

    def __call__(self, output: ValueOutput, batch: Experience, weights: Tensor) -> LossOutput:
        """The loss of a micro-batch: output.values and weights are [B, T], weights above 0 where a token counts."""
        if not hasattr(output, "values"):
            raise ConfigError("ValueLoss is for a Critic; an Actor minimises PolicyLoss()")
        returns = _present(batch.returns, "returns", "call experience.with_advantages(estimator) before the update")
        old_values = batch.values
        if self.clip is not None:
            old_values = _present(old_values, "values", "pass critic= to make_experience, or use ValueLoss(clip=None)")
        return value_loss(output.values, old_values, returns, weights > 0, clip=self.clip, coef=self.coef, weights=weights)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return (torch.where(mask, values, 0) * weights.to(values.dtype)).sum()


def _present(value: Any, name: str, advice: str) -> Any:
    if value is None:
        raise ConfigError(f"the loss needs {name}, which the experience does not have; {advice}")
    return value

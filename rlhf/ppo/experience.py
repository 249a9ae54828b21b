"""Experience: a rollout, its rewards, and what the models say of it, ready for an update.

Legend: B rows, T longest response.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf.errors import ConfigError, RLHFWarning, ShapeError, StaleRolloutError, unknown_option
from rlhf.parallel import sum_over_processes
from rlhf.ppo.advantages import Advantages, masked_mean
from rlhf.ppo.kl import KLPenalty, kl_estimate, kl_mean
from rlhf.reward.rewards import Rewards, on_last_token
from rlhf.rollout.batch import Rollout
from rlhf.rollout.ragged import row_index

Estimator = Callable[["Experience"], Advantages]


class ScoresTokens(Protocol):
    """A policy to hold another against: `Reference`, an `Actor`, a teacher behind a server."""

    def logprobs(self, rollout: Rollout) -> Tensor: ...


class Correction(Protocol):
    """Makes up for an engine that sampled with other probabilities than the policy being trained."""

    def weights(self, old_logprobs: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """importance_weights float [B, T] and kept bool [B, T], False for tokens to be left out of the loss."""
        ...


@dataclass
class Experience:
    """What an update is computed from. Every tensor is [B, T] over response tokens unless stated, on the CPU, None when absent.

    Attributes:
        rollout: what was sampled.
        rewards: how it was judged; None where the loss needs no reward (supervised fine-tuning, distillation).
        old_logprobs: log-probabilities of the policy that the update starts from.
        ref_logprobs: log-probabilities of the reference policy.
        values: the critic's V before each token.
        last_values: [B], the critic's V after the last token.
        loss_weights: float32, what is trained on: 1 where the policy sampled the token, 0 for rows without a score and for rejected
            tokens. Filters edit this, never `rollout.response_mask`, which metrics use.
        importance_weights: correction of each token's loss for the engine's probabilities; detached.
        token_rewards: reward received after each token, KL penalty included; set by `with_advantages`.
        advantages, returns: set by `with_advantages`.
        extras: anything else with B entries.
    """

    rollout: Rollout
    rewards: Rewards | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    last_values: Tensor | None = None
    loss_weights: Tensor = None  # type: ignore[assignment]
    importance_weights: Tensor | None = None
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.rollout.response_ids.shape
        if self.rewards is not None:
            if len(self.rewards) != len(self):
                raise ShapeError(f"rewards must have one score for each of the {len(self)} responses; got {len(self.rewards)}")
            if self.rewards.token_scores is not None and self.rewards.token_scores.shape != shape:
                raise ShapeError(f"token_scores must be {list(shape)} like the rollout; got {list(self.rewards.token_scores.shape)}")
        if self.loss_weights is None:
            self.loss_weights = self.rollout.response_mask.float()
            if self.rewards is not None:
                self.loss_weights = self.loss_weights * self.rewards.scores.isfinite()[:, None]
        for name, value in self._tensors().items():
            expected = shape[:1] if name == "last_values" else shape
            if value.shape != expected:
                raise ShapeError(f"{name} must be {list(expected)} like the rollout; got {list(value.shape)}")

    def __len__(self) -> int:
        return len(self.rollout)

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rollout", "rewards", "extras")}
        return {name: value for name, value in values.items() if value is not None}

    def select(self, indices: Any) -> Experience:
        """The rows at `indices` (int64 or bool tensor, list or slice), in that order; T stays."""
        index = row_index(indices, len(self))
        extras = {
            name: value[index] if isinstance(value, Tensor) else [value[i] for i in index.tolist()] for name, value in self.extras.items()
        }
        return Experience(
            rollout=self.rollout.select(index),
            rewards=None if self.rewards is None else self.rewards.select(index),
            extras=extras,
            **{name: value[index] for name, value in self._tensors().items()},
        )

    def to(self, device: torch.device | str) -> Experience:
        """The tensors of the mathematics on `device`; rollout and rewards stay on the CPU."""
        if torch.device(device).type == "cpu":
            return self
        moved: dict[str, Any] = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, **moved)

    def with_advantages(self, estimator: Estimator, kl: KLPenalty | None = None) -> Experience:
        """Token rewards, advantages and returns by `estimator`; the forward passes are not repeated, so several can be compared.

            rₜ = score · [t is the last token that counts] − coef · KLₜ

        Args:
            estimator: `GAE(...)`, `GRPO(...)`, ... or any callable `experience -> Advantages`, which finds `token_rewards` set.
            kl: penalty on the distance to the reference, taken off the reward token by token. Its controller is updated once,
                with the mean KL of this experience.

        Raises:
            ConfigError: rewards or reference log-probabilities are missing, or the estimator reads whole scores, from which a
                penalty by token cannot be taken.
        """
        if self.rewards is None:
            raise ConfigError("with_advantages needs rewards; pass them to make_experience")
        if isinstance(estimator, type) or not callable(estimator):
            got = f"the class {estimator.__name__}; write {estimator.__name__}()" if isinstance(estimator, type) else f"{estimator!r:.80}"
            raise ConfigError(f"estimator must be a callable, experience -> Advantages, such as GAE(); got {got}")
        if kl is not None and not hasattr(kl, "estimator"):
            raise ConfigError(f"kl must be a KLPenalty; got {kl!r:.80}. Write kl=KLPenalty(0.001)")
        name = getattr(estimator, "__name__", type(estimator).__name__)
        if getattr(estimator, "reads", "token_rewards") == "scores" and kl is not None:
            raise ConfigError(
                f"{name} reads one score a response, so kl= has no place to act; put the KL into the loss instead: "
                "PolicyLoss(kl_coef=..., kl_estimator='k3')"
            )
        token_rewards = self._placed_rewards()
        extras = dict(self.extras)
        if kl is not None:
            if self.ref_logprobs is None or self.old_logprobs is None:
                raise ConfigError("kl= needs log-probabilities of a reference; pass reference=actor.reference() to make_experience")
            mask = self.rollout.response_mask
            divergence = kl_estimate(self.old_logprobs, self.ref_logprobs, kl.estimator, mask=mask)
            extras["kl_coef"] = torch.full((len(self),), float(kl.coef))
            token_rewards = token_rewards - kl.coef * divergence * self.loss_weights.ne(0)
            rows = mask.any(1).sum()
            total, count = sum_over_processes(torch.stack([kl_mean(divergence, mask).double() * rows, rows.double()])).tolist()
            kl.update(total / max(count, 1.0), int(count))
        prepared = replace(self, token_rewards=token_rewards, extras=extras)
        result: Any = estimator(prepared)
        if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(value, Tensor) for value in result):
            raise ShapeError(f"{name} must return Advantages(advantages, returns), two tensors [B, T]; got {type(result).__name__}")
        for part, value in zip(Advantages._fields, result, strict=True):
            if value.shape != token_rewards.shape:
                raise ShapeError(f"{name} must return {part} of shape {list(token_rewards.shape)}, [B, T]; got {list(value.shape)}")
            if not bool(value[self.loss_weights > 0].isfinite().all()):
                raise ShapeError(f"{name} must return finite {part} for all tokens with a loss weight; got NaN or infinity")
        # a row without a score is not trained on: what a careless estimator makes of its NaN must not reach the metrics
        advantages, returns = (torch.where(self.rollout.response_mask & value.isfinite(), value, 0.0) for value in result)
        return replace(prepared, advantages=advantages, returns=returns)

    def _placed_rewards(self) -> Tensor:
        """[B, T]: process rewards where they were given, else the score on the last token that counts; 0 for rows without one."""
        assert self.rewards is not None
        if self.rewards.token_scores is not None:
            return self.rewards.token_scores
        lost = ~self.rollout.response_mask.any(1) & (self.rewards.scores.nan_to_num() != 0)
        if lost.any():
            warnings.warn(
                f"{int(lost.sum())} responses have no sampled token to carry their reward; it is dropped "
                f"(rows {lost.nonzero().squeeze(1).tolist()[:8]})",
                RLHFWarning,
                stacklevel=3,
            )
        return torch.where(lost[:, None], 0.0, on_last_token(self.rewards.scores, self.rollout))

    def metrics(self) -> dict[str, float]:
        """KL to the reference, log-ratio to the engine, advantages and values, as floats under the names of docs/metrics.md."""
        mask = self.rollout.response_mask
        metrics: dict[str, float] = {"experience/trained_tokens": float((self.loss_weights > 0).sum())}
        if self.old_logprobs is not None and self.ref_logprobs is not None:
            for name in ("k1", "k3"):
                metrics[f"kl/reference_{name}"] = float(masked_mean(kl_estimate(self.old_logprobs, self.ref_logprobs, name), mask))
        if len(self) and "kl_coef" in self.extras:
            metrics["kl/coef"] = float(self.extras["kl_coef"][0])
        if self.old_logprobs is not None and self.rollout.logprobs is not None:
            metrics["mismatch/engine_abs_logratio"] = float(masked_mean((self.old_logprobs - self.rollout.logprobs).abs(), mask))
        if self.advantages is not None:
            metrics["advantage/mean"] = float(masked_mean(self.advantages, mask))
            metrics["advantage/std"] = float(masked_mean(self.advantages**2, mask).sub(metrics["advantage/mean"] ** 2).clamp(min=0).sqrt())
        if self.values is not None and self.returns is not None:
            metrics["critic/explained_variance"] = _explained_variance(self.values[mask], self.returns[mask])
        if self.rewards is not None:
            metrics["group/zero_variance_rate"] = _zero_variance_rate(self.rewards.scores, self.rollout.group)
        return metrics

    def __repr__(self) -> str:
        have = ", ".join(name for name in self._tensors() if name != "loss_weights")
        return f"Experience({len(self)} responses × {self.rollout.response_ids.shape[1]} tokens; {have or 'no tensors yet'})"


def make_experience(
    rollout: Rollout,
    rewards: Rewards | None = None,
    *,
    actor: Any,
    reference: ScoresTokens | None = None,
    critic: Any = None,
    old_logprobs: str = "actor",
    correction: Correction | None = None,
    max_staleness: int | None = 0,
) -> Experience:
    """Run the models over a rollout, once, and gather what an update needs.

    Args:
        rollout: B responses.
        rewards: their scores; rows whose status is not OK are left out of the loss.
        actor: the policy to be trained.
        reference: anything with `logprobs(rollout)`, for a KL penalty or KL in the loss.
        critic: for GAE.
        old_logprobs: "actor" computes the starting point of the ratio with the actor; "rollout" trusts the engine's numbers, which
            saves a forward pass where engine and trainer agree (`TransformersEngine(actor)` does, to 1e-5).
        correction: importance weights for rows that were sampled with other probabilities (top-p, an engine of other precision).
        max_staleness: how many optimiser steps old the weights may be that sampled a row; None for any age.

    Raises:
        StaleRolloutError: rows were sampled by older or unknown weights.
        ConfigError: rows were sampled with top-p, top-k or min-p and no correction is given, or log-probabilities are missing; an
            argument is not what it should be.
    """
    for name, value, method, wanted in (
        ("rollout", rollout, "response_mask", "a Rollout"),
        ("rewards", rewards, "scores", "what reward(rollout) returns"),
        ("actor", actor, "logprobs", "an Actor"),
        ("reference", reference, "logprobs", "anything with logprobs(rollout), such as actor.reference()"),
        ("critic", critic, "values", "a Critic"),
        ("correction", correction, "weights", "an ImportanceCorrection"),
    ):
        if not hasattr(value, method) and (value is not None or name in ("rollout", "actor")):
            raise ConfigError(f"{name} must be {wanted}; got {type(value).__name__}")
    if max_staleness is not None and not max_staleness >= 0:
        raise ConfigError(f"max_staleness must be at least 0, or None for any age; got {max_staleness}")
    if old_logprobs not in ("actor", "rollout"):
        raise unknown_option("old_logprobs", old_logprobs, ("actor", "rollout"))
    _check_fresh(rollout, int(actor.weight_version), max_staleness)
    if bool(rollout.filtered.any()) and correction is None:
        raise ConfigError(
            f"{int(rollout.filtered.sum())} of {len(rollout)} rows were sampled under top-p, top-k or min-p, which the policy's "
            "log-probabilities do not know of; sample with top_p=1.0, top_k=-1, min_p=0.0, or pass correction="
        )
    if rollout.logprobs is None and (old_logprobs == "rollout" or correction is not None):
        raise ConfigError("the rollout holds no log-probabilities of the engine; use old_logprobs='actor' and no correction")
    old: Any = actor.logprobs(rollout) if old_logprobs == "actor" else rollout.logprobs
    values = critic.values(rollout) if critic is not None else None
    experience = Experience(
        rollout=rollout,
        rewards=rewards,
        old_logprobs=old,
        ref_logprobs=None if reference is None else reference.logprobs(rollout),
        values=None if values is None else values.values,
        last_values=None if values is None else values.last,
    )
    if correction is not None:
        weights, kept = correction.weights(old, rollout)
        experience = replace(experience, importance_weights=weights, loss_weights=experience.loss_weights * kept)
    if len(rollout) and not bool((experience.loss_weights > 0).any()):
        warnings.warn("no token of this experience can be trained on: every row is empty, unscored or rejected", RLHFWarning, stacklevel=2)
    return experience


def _check_fresh(rollout: Rollout, current: int, max_staleness: int | None) -> None:
    if max_staleness is None or not len(rollout):
        return
    version = rollout.weight_version
    stale = (version < 0) | (version > current) | (current - version > max_staleness)
    if stale.any():
        ages = sorted({current - v if v >= 0 else "unknown" for v in version[stale].tolist()}, key=str)
        raise StaleRolloutError(
            f"{int(stale.sum())} of {len(rollout)} rows were not sampled by the current weights (version {current}): they are {ages} "
            f"optimiser steps old, at most {max_staleness} allowed. Generate with weights=actor, or pass max_staleness= (None for offline "
            "data), best with correction="
        )


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns): 1 is perfect, 0 no better than a constant; NaN where returns do not vary."""
    variance = returns.var(correction=0) if len(returns) else torch.zeros(())
    return float(1 - (returns - values).var(correction=0) / variance) if float(variance) > 0 else float("nan")


def _zero_variance_rate(scores: Tensor, group: Tensor) -> float:
    """Share of the groups with two or more scores whose scores are all equal: no GRPO advantage comes from them."""
    known = scores.isfinite()
    scores, (_, inverse) = scores[known], torch.unique(group[known], return_inverse=True)
    if not len(scores):
        return 0.0
    groups = int(inverse.max()) + 1
    high = torch.full((groups,), -float("inf")).scatter_reduce(0, inverse, scores, "amax")
    low = torch.full((groups,), float("inf")).scatter_reduce(0, inverse, scores, "amin")
    several = torch.bincount(inverse, minlength=groups) > 1
    return float((high == low)[several].float().mean()) if several.any() else 0.0

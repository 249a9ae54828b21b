"""Advantage estimators as objects: options, and which parts of an experience the functions of `advantages` get.

An estimator is any callable `experience -> Advantages`. Its attribute `reads` says what it looks at: "token_rewards", which can hold a KL
penalty, or "scores", one number per response.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from rlhf.errors import ConfigError, RLHFWarning, unknown_option
from rlhf.parallel import gather_rows, num_processes
from rlhf.ppo.advantages import Advantages, gae, grpo, reinforce_plus_plus, rloo, whiten
from rlhf.rollout.groups import GLOBAL_GROUP, has_global_groups

if TYPE_CHECKING:
    from rlhf.ppo.experience import Experience


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation with a critic; see `gae`.

    Attributes:
        gamma: γ, the discount per token.
        lam: λ, 0 (one-step error) to 1 (return minus value).
        whiten: scale advantages to mean 0 and variance 1 over the tokens that are trained on. Returns are never whitened.
        bootstrap: "none" takes every last token for an end; "truncated" counts on the critic's value after the last token of responses
            that ran out of tokens or turns.

    Raises:
        ConfigError: an option is unknown or out of range, or the experience has no values.
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    bootstrap: Literal["none", "truncated"] = "none"
    reads: ClassVar[str] = "token_rewards"

    def __post_init__(self) -> None:
        _check_unit(gamma=self.gamma, lam=self.lam)
        if self.bootstrap not in ("none", "truncated"):
            raise unknown_option("bootstrap", self.bootstrap, ("none", "truncated"))

    def __call__(self, experience: Experience) -> Advantages:
        if experience.values is None:
            raise ConfigError("GAE needs the critic's values, which the experience does not have; pass critic= to make_experience")
        after = None
        if self.bootstrap == "truncated":
            if experience.last_values is None:
                raise ConfigError(
                    "bootstrap='truncated' needs last_values, the critic's values after the last tokens, which the experience does not "
                    "have; pass critic= to make_experience, or use bootstrap='none'"
                )
            after = torch.where(experience.rollout.truncated, experience.last_values, 0)
        result = gae(
            _token_rewards(experience, "GAE"),
            experience.values,
            experience.rollout.response_mask,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap=after,
        )
        return result._replace(advantages=_whitened(result.advantages, _trained(experience))) if self.whiten else result


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """REINFORCE++: discounted returns, whitened over the batch; no critic, no groups. See `reinforce_plus_plus`.

    Attributes:
        gamma: γ, the discount per token.
        whiten: scale advantages to mean 0 and variance 1 over the tokens that are trained on.

    Raises:
        ConfigError: gamma is out of range.
    """

    gamma: float = 1.0
    whiten: bool = True
    reads: ClassVar[str] = "token_rewards"

    def __post_init__(self) -> None:
        _check_unit(gamma=self.gamma)

    def __call__(self, experience: Experience) -> Advantages:
        rewards = _token_rewards(experience, "ReinforcePlusPlus")
        result = reinforce_plus_plus(rewards, experience.rollout.response_mask, gamma=self.gamma)
        return result._replace(advantages=_whitened(result.advantages, _trained(experience))) if self.whiten else result


@dataclass(frozen=True)
class GRPO:
    """Group-relative advantages; GRPO(scale="none") is Dr. GRPO. See `grpo`.

    The rows of one episode share one score and count once in the statistics. Where every group has one response only, advantages are 0
    and each instance warns once.

    Attributes:
        scale: "std" divides by the group's standard deviation, "none" does not.
        ddof: 1 for the sample deviation, 0 for the population's.
        eps: added to the deviation.

    Raises:
        ConfigError: an option is unknown or out of range; process rewards were given; rows of an episode have different scores.
    """

    scale: Literal["std", "none"] = "std"
    ddof: int = 1
    eps: float = 1e-6
    reads: ClassVar[str] = "scores"
    _warned: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scale not in ("std", "none"):
            raise unknown_option("scale", self.scale, ("std", "none"), {"group": "std", "batch": "std", "False": "none", "True": "std"})
        if self.ddof not in (0, 1):
            raise ConfigError(f"ddof must be 1 (sample deviation) or 0 (population deviation); got {self.ddof!r}")
        if not isinstance(self.eps, Real) or not self.eps >= 0:
            raise ConfigError(f"eps must be a number of at least 0; got {self.eps!r}")

    def __call__(self, experience: Experience) -> Advantages:
        def estimate(scores: Tensor, group: Tensor, mask: Tensor) -> Advantages:
            return grpo(scores, group, mask, scale=self.scale, ddof=self.ddof, eps=self.eps)

        return _by_episode("GRPO", experience, estimate, self._warned)


@dataclass(frozen=True)
class RLOO:
    """REINFORCE leave-one-out. Episodes, groups of one, and errors as for `GRPO`; see `rloo`."""

    reads: ClassVar[str] = "scores"
    _warned: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, experience: Experience) -> Advantages:
        return _by_episode("RLOO", experience, rloo, self._warned)


def _by_episode(
    name: str, experience: Experience, estimate: Callable[[Tensor, Tensor, Tensor], Advantages], warned: list[bool]
) -> Advantages:
    """Advantages of episodes from their scores, given to the tokens of all rows of the episode."""
    rollout, rewards = experience.rollout, experience.rewards
    if rewards is None:
        raise ConfigError(f"{name} needs rewards, which the experience does not have; pass them to make_experience")
    if rewards.token_scores is not None:
        raise ConfigError(
            f"{name} reads one score a response and would ignore rewards by token; use GAE() or ReinforcePlusPlus(), "
            "or return one number from the reward function"
        )
    mask = rollout.response_mask
    scores = rewards.scores.to(mask.device)
    known = scores.isfinite()
    ids, episode = torch.unique(rollout.episode, return_inverse=True)
    low, high = (
        scores.new_full((len(ids),), float("nan")).scatter_reduce(0, episode[known], scores[known], how, include_self=False)
        for how in ("amin", "amax")
    )
    if bool((low < high).any()):
        first = int((low < high).nonzero()[0])
        rows = (episode == first).nonzero().squeeze(1).tolist()
        raise ConfigError(
            f"rows {rows} belong to episode {int(ids[first])}, which has one reward, but score {scores[rows].tolist()}; "
            "give all rows of an episode the same score"
        )
    straddles = has_global_groups(rollout)  # some responses to a prompt are in other processes
    group_of_row = torch.as_tensor(rollout.extras[GLOBAL_GROUP]) if straddles else rollout.group
    group = torch.zeros_like(ids).scatter_(0, episode, group_of_row)
    own = slice(0, len(ids))
    if straddles:
        (group, own), (low, _) = gather_rows(group), gather_rows(low)
    if len(low) and len(torch.unique(group)) == len(low) and not warned:
        warned.append(True)
        warnings.warn(
            f"{name} compares the responses to one prompt, and every prompt has one only: all advantages are 0 and nothing will be "
            "learned; sample with SamplingParams(n=8) or so",
            RLHFWarning,
            stacklevel=4,
        )
    one = torch.ones(len(low), 1, dtype=torch.bool, device=mask.device)
    per_row = estimate(low, group, one).advantages[own, 0][episode]
    advantages = torch.where(mask & known[:, None], per_row[:, None], 0)
    return Advantages(advantages, advantages.clone())


def _whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """`whiten` with the moments of the tokens of all processes."""
    if num_processes() == 1:
        return whiten(advantages, mask)
    tokens, own = gather_rows(advantages[mask])
    result = torch.zeros_like(advantages)
    result[mask] = whiten(tokens[None], torch.ones_like(tokens[None], dtype=torch.bool))[0, own]
    return result


def _token_rewards(experience: Experience, name: str) -> Tensor:
    if experience.token_rewards is None:
        raise ConfigError(f"{name} reads token rewards, which experience.with_advantages({name}(...)) puts in place; call that")
    return experience.token_rewards


def _trained(experience: Experience) -> Tensor:
    """[B, T] bool: tokens the policy sampled and whose loss counts. Rows without a score must not shift the others' moments."""
    mask = experience.rollout.response_mask
    return mask if experience.loss_weights is None else mask & (experience.loss_weights > 0)


def _check_unit(**options: float) -> None:
    for name, value in options.items():
        if not isinstance(value, Real) or not 0 <= value <= 1:
            raise ConfigError(f"{name} must be a number between 0 and 1, got {value!r}")

"""KL divergence to a reference policy: estimators per token, and the coefficient it is charged at.

Legend: B rows, T longest response. A log-probability is that of the token which the policy sampled, in nats.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError, unknown_option

ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
# Names used elsewhere, for the error that suggests ours.
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k2+": "k2", "low_var_kl+": "k3+"}
# Beyond this log-ratio exp goes on as a straight line.
_LINEAR_BEYOND = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1", *, mask: Tensor | None = None) -> Tensor:
    """Estimates KL(policy ‖ reference) at each token from the log-probabilities of the sampled token.

        d = logp − ref
        k1 = d                   unbiased, large variance, negative for some tokens
        k2 = ½ d²                biased, never negative; its gradient, on-policy, is that of the KL
        k3 = exp(−d) − 1 + d     unbiased, never negative; its gradient, on-policy, is that of KL(reference ‖ policy)
        abs = |d|                a distance, not an estimate of the KL
        k1+, k3+                 the value of k1, k3 with the gradient of k2

    As a loss, k1 has an expected gradient of exactly 0. Above −d = 20 the exponential of k3 goes on as a straight line: the value stays
    finite and the gradient still pulls the policy back, which a clamp would not.

    Args:
        logprobs: [B, T] of the policy.
        ref_logprobs: [B, T] of the reference, for the same tokens.
        estimator: one of the names above.
        mask: [B, T] bool; where it is False the result and the gradient are 0, whatever stands there. None: all tokens count.

    Returns:
        Tensor: [B, T], in nats.

    Raises:
        ShapeError: the shapes differ, or mask is not bool.
        ConfigError: unknown estimator.

    >>> import torch
    >>> kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), "k3")
    tensor([[0.3679]])

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ShapeError(f"ref_logprobs must be {tuple(logprobs.shape)} like logprobs; got {tuple(ref_logprobs.shape)}")
    if estimator not in ESTIMATORS:
        raise unknown_option("estimator", estimator, ESTIMATORS, _ALIASES)
    difference = logprobs - ref_logprobs
    if mask is not None:
        _check_mask(mask, difference)
        difference = torch.where(mask, difference, 0)  # before exp: a where behind it lets NaN into the gradient
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    square = 0.5 * difference.square()
    if estimator == "k2":
        return square
    if estimator == "k1+":
        return square + (difference - square).detach()
    inside = difference.clamp(-_LINEAR_BEYOND, _LINEAR_BEYOND)
    # exp(−d) for |d| ≤ 20, its tangent beyond; expm1 keeps the digits of small d.
    k3 = torch.expm1(-inside) - torch.exp(-inside) * (difference - inside) + difference
    return k3 if estimator == "k3" else square + (k3 - square).detach()


def kl_mean(kl: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each row, then over the rows that have any: what a KL controller is told.

    Args:
        kl: [B, T] in nats; anything may stand where mask is False.
        mask: [B, T] bool, True where a token counts.

    Returns:
        Tensor: 0-dim; 0 if no token counts.

    Raises:
        ShapeError: the shapes differ, or mask is not bool.

    >>> import torch
    >>> kl_mean(torch.tensor([[0.4, 0.4], [0.0, 0.0]]), torch.tensor([[True, True], [False, False]]))
    tensor(0.4000)
    """
    _check_mask(mask, kl)
    lengths = mask.sum(1)
    rows = torch.where(mask, kl, 0).sum(1) / lengths.clamp(min=1)
    return rows.sum() / (lengths > 0).sum().clamp(min=1)


class KLController(Protocol):
    """What decides the coefficient of a KL penalty. `FixedKL` and `AdaptiveKL` are two; yours may be a third."""

    @property
    def coef(self) -> float: ...
    def update(self, kl: float | Tensor, rows: int) -> None: ...
    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKL:
    """A coefficient that stays what it is.

    Attributes:
        coef: weight of one nat of KL against one unit of reward; not negative.

    Raises:
        ConfigError: coef is negative or not finite.
    """

    def __init__(self, coef: float) -> None:
        self.coef = _checked("coef", coef, zero=True)

    def update(self, kl: float | Tensor, rows: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = _checked("coef", state["coef"], zero=True)

    def __repr__(self) -> str:
        return f"FixedKL(coef={self.coef})"


class AdaptiveKL:
    """A coefficient that steers the KL towards a target.

        coef ← coef · (1 + clip(KL / target − 1, −0.2, 0.2) · rows / horizon)

    One update leaves at least a tenth of the coefficient, however many rows it counts: the formula alone would go below 0, where the
    penalty rewards divergence, or to 0, from where it could never rise again. A KL that is not finite changes nothing.

    Attributes:
        coef: present weight of one nat of KL against one unit of reward.
        target: KL per token aimed at, in nats.
        horizon: rows over which the coefficient changes by at most a fifth of itself.

    Raises:
        ConfigError: coef, target or horizon is not positive and finite.

    >>> controller = AdaptiveKL(0.1, target=0.02, horizon=1000)
    >>> controller.update(kl=0.05, rows=500)
    >>> round(controller.coef, 6)
    0.11

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef = _checked("coef", coef)
        self.target = _checked("target", target)
        self.horizon = _checked("horizon", horizon)

    def update(self, kl: float | Tensor, rows: int) -> None:
        """Move the coefficient.

        Args:
            kl: mean over the tokens, then over the rows (`kl_mean`), in nats.
            rows: responses that mean was taken over, over all processes.
        """
        kl = float(kl)
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= max(1 + error * rows / self.horizon, 0.1)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = _checked("coef", state["coef"])

    def __repr__(self) -> str:
        return f"AdaptiveKL(coef={self.coef}, target={self.target}, horizon={self.horizon})"


class KLPenalty:
    """KL in the reward: each token is charged for its distance from the reference, through `experience.with_advantages`.

        rₜ ← rₜ − coef · KLₜ

    In expectation this is the gradient of the reverse KL, for k1. It goes with estimators that read token rewards (GAE, REINFORCE++); KL in
    the loss, for GRPO and its like, belongs to `PolicyLoss(kl_coef=...)`.

    Attributes:
        controller: `FixedKL`, `AdaptiveKL`, or anything with coef, update, state_dict and load_state_dict.
        estimator: a name that `kl_estimate` knows; only the value counts here.

    Raises:
        ConfigError: negative coefficient, unknown estimator, or a controller without the four names above.

    >>> KLPenalty(0.001).coef
    0.001
    """

    def __init__(self, coef: float | KLController, estimator: str = "k1") -> None:
        if estimator not in ESTIMATORS:
            raise unknown_option("estimator", estimator, ESTIMATORS, _ALIASES)
        if isinstance(coef, int | float):
            self.controller: KLController = FixedKL(coef)
        else:
            missing = [name for name in ("coef", "update", "state_dict", "load_state_dict") if not hasattr(coef, name)]
            if missing:
                raise ConfigError(
                    f"coef must be a number or a KL controller; got a {type(coef).__name__}, which has no {', '.join(missing)}; "
                    "FixedKL and AdaptiveKL are examples"
                )
            self.controller = coef
        self.estimator = estimator

    @property
    def coef(self) -> float:
        """The coefficient as it is now."""
        return self.controller.coef

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T] −coef · KL, the penalty's part of the token rewards; 0 where mask is False.

        >>> import torch
        >>> KLPenalty(0.1)(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]]))
        tensor([[-0.1000]])
        """
        return -self.coef * kl_estimate(logprobs, ref_logprobs, self.estimator, mask=mask)

    def update(self, kl: float | Tensor, rows: int) -> None:
        """Tell the controller the KL of a batch: mean over tokens, then rows (`kl_mean`), and the number of rows."""
        self.controller.update(kl, rows)

    def state_dict(self) -> dict[str, float]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state)

    def __repr__(self) -> str:
        return f"KLPenalty({self.controller!r}, estimator={self.estimator!r})"


def _checked(name: str, value: float, *, zero: bool = False) -> float:
    if not isinstance(value, Real) or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{name} must be a finite number {'of at least 0' if zero else 'above 0'}; got {value!r}")
    return float(value)


def _check_mask(mask: Tensor, tensor: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool, got {str(mask.dtype).removeprefix('torch.')}; compare it with 0 first")
    if mask.shape != tensor.shape:
        raise ShapeError(f"mask must be [B, T] = {tuple(tensor.shape)}; got {tuple(mask.shape)}")

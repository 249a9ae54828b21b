"""Losses of PPO: pure functions of tensors, each a sum of weighted token losses.

Legend: B rows, T longest response. A mask is bool, True where a token counts; what stands where it is False is not read, neither by the
value nor by the gradient. Because a loss is a sum and its weights can be computed from the counts of a whole mini-batch, micro-batches
and processes just add up.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError, unknown_option

AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-mean-token-sum", "constant")
# Names used elsewhere, for the error that suggests ours.
_ALIASES = {
    "mean": "token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "sequence-mean",
    "seq-mean": "sequence-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
    "seq-mean-token-sum-norm": "constant",
    "dr_grpo": "constant",
    "dr-grpo": "constant",
}
# Beyond this log-ratio exp goes on as a straight line.
_LINEAR_BEYOND = 20.0


class LossOutput(NamedTuple):
    """What a loss returns.

    Attributes:
        loss: 0-dim, with a graph: the sum of the weighted token losses.
        metrics: 0-dim, detached, by name: means over the tokens that count, all of equal weight; the largest value where a name ends in
            `_max`. Floats are made of them once, at the end of a step.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def token_weights(
    mask: Tensor, mode: str, *, constant: float | None = None, tokens: int | Tensor | None = None, sequences: int | Tensor | None = None
) -> Tensor:
    """The weight of each token in the sum that is the loss.

        "token-mean"                1 / N_tokens                 every token alike (DAPO); long responses weigh more
        "sequence-mean"             1 / (N_rows · length)        mean over a row's tokens, then over rows (GRPO)
        "sequence-mean-token-sum"   1 / N_rows                   sum over a row's tokens, mean over rows
        "constant"                  1 / (N_rows · constant)      the same over a fixed length (Dr. GRPO)

    N_rows counts rows with a token that counts, length is the number of such tokens in the row.

    Args:
        mask: [B, T] bool, True where a token counts.
        mode: one of the names above.
        constant: for "constant" only: the divisor of a row's sum, such as the largest response length.
        tokens: N_tokens of the whole mini-batch over all processes; counted in mask if None.
        sequences: N_rows of the whole mini-batch over all processes; counted in mask if None.

    Returns:
        Tensor: [B, T] float64 (float32 on mps), 0 where mask is False. A loss casts it to the dtype of its log-probabilities.

    Raises:
        ShapeError: mask is not bool [B, T].
        ConfigError: unknown mode, "constant" without a positive constant, or a constant for another mode.

    >>> import torch
    >>> token_weights(torch.tensor([[True, False], [True, True]]), "sequence-mean")
    tensor([[0.5000, 0.0000],
            [0.2500, 0.2500]], dtype=torch.float64)

    Source: Liu et al. 2025, arXiv:2503.20783; Yu et al. 2025, arXiv:2503.14476 (DAPO), section 3.3.
    """
    _check_mask(mask)
    check_aggregation(mode, constant)
    weights = mask.to(torch.float32 if mask.device.type == "mps" else torch.float64)
    if mode == "token-mean":
        return weights / _at_least_one(mask.sum() if tokens is None else tokens, weights)
    weights = weights / _at_least_one(mask.any(1).sum() if sequences is None else sequences, weights)
    if mode == "sequence-mean":
        return weights / mask.sum(1, keepdim=True).clamp(min=1)
    return weights if constant is None else weights / constant


def check_aggregation(mode: str, constant: float | None) -> None:
    """Raise a ConfigError unless `token_weights` takes this mode together with this constant."""
    if mode not in AGGREGATIONS:
        raise unknown_option("aggregate", mode, AGGREGATIONS, _ALIASES)
    if mode == "constant" and (constant is None or not constant > 0):
        raise ConfigError(f"aggregate='constant' needs constant= above 0, such as the largest response length; got {constant}")
    if mode != "constant" and constant is not None:
        raise ConfigError(f"constant={constant} has no meaning for aggregate={mode!r}; leave it out, or use aggregate='constant'")


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float | tuple[float, float] = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> LossOutput:
    """The clipped surrogate of PPO.

        ρₜ = exp(logpₜ − old_logpₜ)
        ℓₜ = max(−Aₜ ρₜ, −Aₜ clip(ρₜ, 1 − low, 1 + high)),    loss = Σₜ wₜ uₜ ℓₜ
        with dual_clip c, where Aₜ < 0:  ℓₜ ← min(ℓₜ, −c Aₜ)

    w are the weights, u the importance weights. Beyond a log-ratio of ±20 the exponential goes on as a straight line: the loss stays
    finite and its gradient still pulls the policy back, where a clamp would leave it alone. With logprobs equal to old_logprobs the ratio
    is exactly 1 and the gradient is REINFORCE's.

    Args:
        logprobs: [B, T] of the policy being trained.
        old_logprobs: [B, T] of the policy at the start of the update; no gradient.
        advantages: [B, T]; no gradient.
        mask: [B, T] bool, True where a token counts.
        clip: one half-width for both sides, or (low, high).
        dual_clip: above 1, the ratio from which a token with a negative advantage stops pushing; None for no such bound.
        weights: [B, T]; token-mean over mask if None.
        importance_weights: [B, T] correction of each token's loss for the engine's probabilities; 1 if None; no gradient.

    Returns:
        LossOutput, with the metrics policy_loss (unweighted token mean of uₜ ℓₜ), clip_fraction (tokens whose ratio is clipped: no
        gradient), clip_fraction_low and clip_fraction_high (of these, those below 1 − low and above 1 + high), clip_fraction_dual,
        kl_old (k3 estimate of KL(old ‖ policy), in nats), ratio_mean and ratio_max.

    Raises:
        ShapeError: shapes differ, or mask is not bool.
        ConfigError: a clip is negative, or dual_clip is not above 1.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Ye et al. 2020, arXiv:1912.09729 (dual clip); arXiv:2503.14476 (low, high).
    """
    _check_tokens(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights, importance_weights=importance_weights
    )
    low, high = clip_range(clip)
    check_dual_clip(dual_clip)
    # In float32 at least, and masked before exp: a where behind it lets NaN into the gradient.
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, old_logprobs.dtype), torch.float32)
    log_ratio = torch.where(mask, logprobs.to(dtype) - old_logprobs.detach().to(dtype), 0)
    ratio = _exp(log_ratio)
    advantages = torch.where(mask, advantages.detach().to(dtype), 0)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    acts = clipped > unclipped
    acts_dual = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        acts_dual = (advantages < 0) & (losses > ceiling)
        losses = torch.where(acts_dual, ceiling, losses)
    if importance_weights is not None:
        losses = losses * torch.where(mask, importance_weights.detach().to(dtype), 0)
    loss = _weighted_sum(losses, mask, weights)
    with torch.no_grad():
        metrics = {
            "policy_loss": _mean(losses, mask),
            "clip_fraction": _mean(acts, mask),
            "clip_fraction_low": _mean(acts & (ratio < 1), mask),
            "clip_fraction_high": _mean(acts & (ratio > 1), mask),
            "clip_fraction_dual": _mean(acts_dual, mask),
            "kl_old": _mean(ratio - 1 - log_ratio, mask),
            "ratio_mean": _mean(ratio, mask),
            "ratio_max": torch.where(mask, ratio, 0).max() if mask.numel() else ratio.new_zeros(()),
        }
    return LossOutput(loss, metrics)


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    coef: float = 0.5,
    weights: Tensor | None = None,
) -> LossOutput:
    """Squared error of the critic, clipped around the values it started from.

        ℓₜ = coef · (Vₜ − Rₜ)²
        with clip c:  ℓₜ = coef · max((Vₜ − Rₜ)², (clip(Vₜ, V_oldₜ − c, V_oldₜ + c) − Rₜ)²)

    Args:
        values: [B, T] of the critic being trained.
        old_values: [B, T] at the start of the update; no gradient. May be None without clip.
        returns: [B, T] targets; no gradient.
        mask: [B, T] bool, True where a token counts.
        clip: half-width, in units of reward; None for none.
        coef: the factor before the square; 0.5 is the one half of the textbook, there is no other.
        weights: [B, T]; token-mean over mask if None.

    Returns:
        LossOutput, with the metrics value_loss (unweighted token mean), clip_fraction (tokens whose clipped error is the larger: no
        gradient), value_mean, return_mean and error_abs (mean |V − R|).

    Raises:
        ShapeError: shapes differ, or mask is not bool.
        ConfigError: clip is negative or given without old_values.

    >>> import torch
    >>> one = torch.ones(1, 1)
    >>> value_loss(one * 0.6, one * 0.5, one * 1.2, one > 0, clip=0.2).loss
    tensor(0.1800)

    Source: Schulman et al. 2017, arXiv:1707.06347; the clip is that of OpenAI's baselines.
    """
    _check_tokens(mask, values=values, old_values=old_values, returns=returns, weights=weights)
    check_value_clip(clip)
    if clip is not None and old_values is None:
        raise ConfigError(f"clip={clip} needs old_values, the critic's values at the start of the update; pass them, or clip=None")
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = torch.where(mask, values.to(dtype), 0)
    returns = torch.where(mask, returns.detach().to(dtype), 0)
    squares = (values - returns).square()
    acts = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        old_values = torch.where(mask, old_values.detach().to(dtype), 0)
        clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        acts = clipped > squares
        squares = torch.maximum(squares, clipped)
    losses = coef * squares
    loss = _weighted_sum(losses, mask, weights)
    with torch.no_grad():
        metrics = {
            "value_loss": _mean(losses, mask),
            "clip_fraction": _mean(acts, mask),
            "value_mean": _mean(values, mask),
            "return_mean": _mean(returns, mask),
            "error_abs": _mean((values - returns).abs(), mask),
        }
    return LossOutput(loss, metrics)


def clip_range(clip: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of a clip given as one number or as two; ConfigError unless both are at least 0."""
    bounds = tuple(clip) if isinstance(clip, tuple | list) else (clip, clip)
    if len(bounds) != 2 or not all(isinstance(bound, Real) and bound >= 0 for bound in bounds):
        raise ConfigError(f"clip must be at least 0, or a pair (low, high) of such numbers, got {clip}; 0.2 and (0.2, 0.28) are usual")
    return bounds


def check_dual_clip(dual_clip: float | None) -> None:
    """Raise a ConfigError unless dual_clip is None or above 1."""
    if dual_clip is not None and not (isinstance(dual_clip, Real) and dual_clip > 1):
        raise ConfigError(f"dual_clip must be above 1, got {dual_clip}; 3.0 is usual, None leaves it out")


def check_value_clip(clip: float | None) -> None:
    """Raise a ConfigError unless the clip of the value loss is None or at least 0."""
    if clip is not None and not (isinstance(clip, Real) and clip >= 0):
        raise ConfigError(f"clip must be at least 0, or None for no clipping; got {clip}")


def _exp(x: Tensor) -> Tensor:
    """exp(x) for |x| ≤ 20, its tangent beyond."""
    inside = x.clamp(-_LINEAR_BEYOND, _LINEAR_BEYOND)
    return inside.exp() * (1 + (x - inside))


def _weighted_sum(losses: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        weights = token_weights(mask, "token-mean")
    return (losses * torch.where(mask, weights.detach(), 0).to(losses.dtype)).sum()


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count; 0 if none does."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def _at_least_one(count: int | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(count, device=like.device).to(like.dtype).clamp(min=1)


def _check_mask(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool, got {str(mask.dtype).removeprefix('torch.')}; compare it with 0 first")
    if mask.dim() != 2:
        raise ShapeError(f"mask must be [B, T], got {tuple(mask.shape)}; a single response needs a leading dimension of 1")


def _check_tokens(mask: Tensor, **tensors: Tensor | None) -> None:
    _check_mask(mask)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != mask.shape:
            raise ShapeError(f"{name} must be [B, T] = {tuple(mask.shape)} like mask; got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {str(tensor.dtype).removeprefix('torch.')}; convert it with .float()")

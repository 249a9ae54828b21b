"""Advantage estimators: pure functions of tensors, local to one process.

Legend: B rows, T longest response, N most tokens that count in one row, G groups. A mask is bool, True where a token counts; what stands
where it is False is not read, but for rewards (see `gae`). Group statistics and moments are taken in float64; advantages and returns have
the dtype of the inputs and carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf.errors import ConfigError, ShapeError, unknown_option

# Added to the variance inside the square root, so that whitening a nearly constant batch stays bounded.
_WHITEN_EPS = 1e-8
# Tokens per block of the scan; 8 to 64 are about equally fast on a CPU (B=1024, T=4096).
_BLOCK = 32
# Elements of a slice of rows that are worked on at once on a CPU.
_CACHED = 1 << 18


class Advantages(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: [B, T] how much better each token was than expected, 0 where the mask is False.
        returns: [B, T] what a critic is fitted to, 0 where the mask is False. Estimators without a critic repeat the advantages here.
    """

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0, bootstrap: Tensor | None = None
) -> Advantages:
    """Generalised advantage estimation over the tokens that count.

        δₜ = rₜ + γ Vₜ₊₁ − Vₜ,    Aₜ = δₜ + γ λ Aₜ₊₁,    returns = A + V

    A token with mask False is skipped as if it were not there: it neither discounts nor cuts credit. A finite reward on such a token
    (a tool's output, say) moves to the last token before it that counts, or to the row's first token that counts where there is none
    before, so that a row's sum of rewards is conserved; a row without any token that counts is left at 0.
    A NaN or inf there is garbage and dropped.

    Args:
        rewards: [B, T] reward received after each token.
        values: [B, T] V of the state before each token; anything may stand where mask is False.
        mask: [B, T] bool, True where the policy chose the token.
        gamma: γ, the discount per token, 0 to 1.
        lam: λ, 0 (one-step error) to 1 (return minus value).
        bootstrap: [B] value of the state after the last token of a truncated response; 0 if None.

    Returns:
        Advantages: advantages and returns, both [B, T], 0 where mask is False. Not whitened.

    Raises:
        ShapeError: the shapes differ or mask is not bool.
        ConfigError: gamma or lam is outside 0 to 1.

    >>> import torch
    >>> mask = torch.tensor([[True, True, True]])
    >>> gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]]), mask).advantages
    tensor([[0.5000, 0.4000, 0.3000]])

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    _check_tokens(mask, rewards=rewards, values=values)
    _check_unit(gamma=gamma, lam=lam)
    if bootstrap is not None:
        _check_rows(mask, bootstrap=bootstrap)
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (rewards, values))
    advantages, returns = (torch.zeros(mask.shape, dtype=dtype, device=mask.device) for _ in range(2))
    for rows in _row_slices(mask):
        layout = _Layout(mask[rows], rewards[rows])
        rewards_BN = layout.compact(rewards[rows], conserve=True)
        # One more column than tokens: V of the state after a row's last token stands right behind that token's own V.
        values_BN = torch.nn.functional.pad(layout.compact(values[rows]), (0, 1))
        after = 0 if bootstrap is None else bootstrap[rows, None].to(values_BN.dtype)
        values_BN.scatter_(1, layout.counts[:, None], after)
        deltas_BN = values_BN[:, 1:].mul(gamma).add_(rewards_BN).sub_(values_BN[:, :-1])
        advantages_BN = _discounted_sums(layout.clear(deltas_BN), gamma * lam)
        layout.spread(advantages_BN, advantages[rows])
        layout.spread(advantages_BN + values_BN[:, :-1], returns[rows], clear=True)
    return Advantages(advantages, returns)


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Advantages:
    """REINFORCE++: the discounted return of each token, without a critic or groups.

        Gₜ = rₜ + γ Gₜ₊₁,    advantages = returns = G

    Tokens with mask False are skipped, and rewards on them move, as in `gae`. Whitening over the batch, which the method asks for, is
    `whiten`'s job.

    Args:
        rewards: [B, T] reward received after each token.
        mask: [B, T] bool, True where the policy chose the token.
        gamma: γ, the discount per token, 0 to 1.

    Raises:
        ShapeError: the shapes differ or mask is not bool.
        ConfigError: gamma is outside 0 to 1.

    Source: Hu 2025, arXiv:2501.03262.
    """
    _check_tokens(mask, rewards=rewards)
    _check_unit(gamma=gamma)
    returns = torch.zeros_like(rewards)
    for rows in _row_slices(mask):
        layout = _Layout(mask[rows], rewards[rows])
        layout.spread(_discounted_sums(layout.clear(layout.compact(rewards[rows], conserve=True)), gamma), returns[rows])
    return Advantages(returns, returns.clone())


@torch.no_grad()
def grpo(
    scores: Tensor, group: Tensor, mask: Tensor, *, scale: Literal["std", "none"] = "std", ddof: int = 1, eps: float = 1e-6
) -> Advantages:
    """Group-relative advantages: a score against the scores of the other responses to the same prompt.

        scale="std":   Aᵢ = (sᵢ − mean(s)) / (std(s) + eps)       GRPO
        scale="none":  Aᵢ = sᵢ − mean(s)                          Dr. GRPO

    Mean and deviation are those of the row's group. Groups go by id, in any order and of any size. A group of one and a group whose
    scores are all equal get exactly 0: they say nothing about what was better. A NaN or infinite score gets 0 and stays out of its
    group's statistics.

    Args:
        scores: [B] one score per response.
        group: [B] integer, equal for responses to the same prompt.
        mask: [B, T] bool, tokens that receive the advantage.
        scale: divide by the group's standard deviation, or don't.
        ddof: 1 for the sample deviation, 0 for the population's.
        eps: added to the deviation.

    Returns:
        Advantages: both fields hold the row's advantage on its tokens, 0 where mask is False; the method has no critic to fit.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ConfigError: unknown scale, or ddof is neither 0 nor 1.

    >>> import torch
    >>> mask = torch.ones(4, 1, dtype=torch.bool)
    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7]), mask, scale="none").advantages.squeeze(1)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1; Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO).
    """
    groups = _Groups(scores, group, mask)
    if scale not in ("std", "none"):
        raise unknown_option("scale", scale, ("std", "none"))
    if ddof not in (0, 1):
        raise ConfigError(f"ddof must be 1 (sample deviation) or 0 (population deviation); got {ddof!r}")
    centred = groups.deviations(groups.mean(torch.ones_like(groups.scores)))
    if scale == "std":
        variance_G = groups.sum(centred.square()) / (groups.sizes - ddof).clamp(min=1)
        centred = centred / (variance_G.sqrt() + eps)[groups.index]
    return groups.on_tokens(centred)


@torch.no_grad()
def rloo(scores: Tensor, group: Tensor, mask: Tensor) -> Advantages:
    """REINFORCE leave-one-out: a score against the mean of the group's other scores.

        Aᵢ = sᵢ − mean(sⱼ, j ≠ i) = n / (n − 1) · (sᵢ − mean(s))

    Groups of one, equal scores and NaN are treated as in `grpo`; arguments and errors are the same.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    groups = _Groups(scores, group, mask)
    factor_G = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return groups.on_tokens(groups.deviations(groups.mean(torch.ones_like(groups.scores))) * factor_G[groups.index])


@torch.no_grad()
def remax(scores: Tensor, baselines: Tensor, mask: Tensor) -> Advantages:
    """ReMax: a sampled response's score against the score of the greedy response to the same prompt.

        A = s − baseline,    returns = s

    A row whose score or baseline is not finite gets 0.

    Args:
        scores: [B] one score per sampled response.
        baselines: [B] score of the greedy response to the row's prompt.
        mask: [B, T] bool, tokens that receive the advantage.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Li et al. 2023, arXiv:2310.10505.
    """
    _check_mask(mask)
    _check_rows(mask, scores=scores, baselines=baselines)
    known = scores.isfinite() & baselines.isfinite()
    advantages = torch.where(known, scores - baselines, 0)
    return Advantages(_on_tokens(advantages, mask), _on_tokens(torch.where(known, scores, 0), mask))


@torch.no_grad()
def opo(scores: Tensor, group: Tensor, lengths: Tensor, mask: Tensor) -> Advantages:
    """On-policy RL with the optimal baseline: the group's mean score, weighted by response length.

        Aᵢ = sᵢ − Σⱼ lⱼ sⱼ / Σⱼ lⱼ

    The variance-minimising baseline weighs by the squared gradient norm, which is taken to grow with length.
    Groups of one, equal scores and NaN are treated as in `grpo`.

    Args:
        scores: [B] one score per response.
        group: [B] integer, equal for responses to the same prompt.
        lengths: [B] tokens in each response, not negative.
        mask: [B, T] bool, tokens that receive the advantage.

    Raises:
        ShapeError: shapes or dtypes do not fit.

    Source: Hao et al. 2025, arXiv:2505.23585.
    """
    groups = _Groups(scores, group, mask)
    if lengths.shape != scores.shape:
        raise ShapeError(f"lengths must be [B] = {tuple(scores.shape)}, one count per row of mask; got {tuple(lengths.shape)}")
    return groups.on_tokens(groups.deviations(groups.mean(lengths.to(groups.scores.dtype))))


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scale the values that count to variance 1 and shift them to mean 0.

        (x − mean) / sqrt(var + 1e-8),    var the population variance over all tokens that count

    One token, or values that are all equal, have no spread: their deviation from the mean is exactly 0.

    Args:
        values: [B, T]; anything may stand where mask is False.
        mask: [B, T] bool, True where a value counts.
        shift_mean: False keeps the mean and scales only the spread around it, as one wants for rewards.

    Returns:
        Tensor: [B, T] in the dtype of values, 0 where mask is False.

    Raises:
        ShapeError: the shapes differ or mask is not bool.
    """
    _check_tokens(mask, values=values)
    if not bool(mask.any()):
        return torch.where(mask, values, 0)
    counted = values[mask].to(_wide(values))
    mean = counted.mean()
    centred = counted - mean
    variance = centred.square().mean()
    if bool(counted.min() == counted.max()):
        centred = centred * 0  # the mean of equal numbers may be off by one rounding, which the division would blow up
    scaled = centred * torch.rsqrt(variance + _WHITEN_EPS)
    result = scaled if shift_mean else scaled + mean
    return torch.zeros_like(values).masked_scatter(mask, result.to(values.dtype))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the values that count; 0, with a graph, if none does.

    Args:
        values: [B, T]; anything may stand where mask is False.
        mask: [B, T] bool, True where a value counts.

    Returns:
        Tensor: 0-dim, in the dtype of values.

    Raises:
        ShapeError: the shapes differ or mask is not bool.

    >>> import torch
    >>> masked_mean(torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]]))
    tensor(2.)
    """
    _check_tokens(mask, values=values)
    total = torch.where(mask, values, 0).to(_wide(values)).sum()
    return (total / mask.sum().clamp(min=1)).to(values.dtype)


class _Groups:
    """Scores sorted into groups, with the rows whose score is unknown left out."""

    def __init__(self, scores: Tensor, group: Tensor, mask: Tensor) -> None:
        _check_mask(mask)
        _check_rows(mask, scores=scores)
        if group.shape != scores.shape or group.is_floating_point() or group.dtype == torch.bool:
            got = f"{str(group.dtype).removeprefix('torch.')} {tuple(group.shape)}"
            raise ShapeError(f"group must be integers [B] = {tuple(scores.shape)}, one id per row of mask; got {got}")
        self.mask = mask
        self.dtype = scores.dtype
        self.known = scores.isfinite()
        self.scores = torch.where(self.known, scores, 0).to(_wide(scores))
        self.index = torch.unique(group, return_inverse=True)[1]
        self.count = int(self.index.max()) + 1 if len(self.index) else 0
        self.sizes = self.sum(torch.ones_like(self.scores))

    def sum(self, values: Tensor) -> Tensor:
        """[G] sums over the rows with a known score."""
        return values.new_zeros(self.count).index_add_(0, self.index, torch.where(self.known, values, 0))

    def mean(self, weights: Tensor) -> Tensor:
        """[B] weighted mean score of each row's group; 0 where the weights are."""
        total_G = self.sum(weights)
        return (self.sum(weights * self.scores) / torch.where(total_G == 0, 1, total_G))[self.index]

    def deviations(self, baseline: Tensor) -> Tensor:
        """[B] scores − baseline, exactly 0 in groups without spread (where rounding would leave noise) and where the score is unknown."""
        empty_G = self.scores.new_full((self.count,), math.inf)
        known = self.index[self.known]
        low_G = empty_G.scatter_reduce(0, known, self.scores[self.known], "amin")
        high_G = (-empty_G).scatter_reduce(0, known, self.scores[self.known], "amax")
        return torch.where(self.known & (low_G < high_G)[self.index], self.scores - baseline, 0)

    def on_tokens(self, advantages: Tensor) -> Advantages:
        tokens = _on_tokens(advantages.to(self.dtype), self.mask)
        return Advantages(tokens, tokens.clone())


def _on_tokens(values_B: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values_B[:, None], 0)


def _row_slices(mask: Tensor) -> Iterator[slice]:
    """Slices of rows, on a CPU so small that the intermediate results stay in its cache, which makes the scan several times faster."""
    rows, width = mask.shape
    step = max(1, _CACHED // max(width, 1)) if mask.device.type == "cpu" else max(rows, 1)
    return (slice(start, start + step) for start in range(0, rows, step))


class _Layout:
    """Where the tokens that count go when the others are taken out: together at the left, N = the most in one row."""

    def __init__(self, mask: Tensor, rewards: Tensor) -> None:
        self.mask = mask
        self.counts = mask.sum(1)
        self.width = int(self.counts.max())
        # [B, T] target column of each token; one that does not count shares the column of the last one before it that does.
        # None where nothing has to move, the usual and faster case: no holes, no reward beyond the end.
        self.columns = None
        if bool((mask[:, 1:] > mask[:, :-1]).any()) or bool((rewards.nan_to_num(0.0, 0.0, 0.0) * ~mask).any()):
            # A float32 cumsum is exact up to 2²⁴ tokens and much faster than one over bool or int64.
            self.columns = mask.to(torch.float32).cumsum(1).sub_(1).clamp_(min=0).to(torch.int64)
        self.full = int(self.counts.min()) == self.width

    def compact(self, values: Tensor, *, conserve: bool = False) -> Tensor:
        """[B, N] the values that count, with anything behind them; conserve adds finite values from elsewhere at the column they share."""
        if self.columns is None:
            return values[:, : self.width]
        if bool(values.sum().isfinite()):
            kept = values if conserve else values * self.mask  # where nothing is NaN or inf, a product does what the slower where does
        else:
            kept = torch.where(self.mask, values, values.nan_to_num(0.0, 0.0, 0.0) if conserve else 0)
        # At least one column, for what is dropped from rows in which nothing counts.
        target = kept.new_zeros(len(kept), max(self.width, 1))
        return target.scatter_add_(1, self.columns, kept)[:, : self.width]

    def clear(self, values_BN: Tensor) -> Tensor:
        """Write 0 behind each row's tokens."""
        if self.full:
            return values_BN
        behind = torch.arange(self.width, device=self.counts.device) >= self.counts[:, None]
        return values_BN.masked_fill(behind, 0)

    def spread(self, values_BN: Tensor, out: Tensor, *, clear: bool = False) -> None:
        """Write [B, N] back to the tokens that count in out [B, T], which holds zeros; clear it first if it is not 0 behind them."""
        if self.columns is None:
            out[:, : self.width] = self.clear(values_BN) if clear else values_BN
        elif self.width:
            out.copy_(torch.where(self.mask, values_BN.gather(1, self.columns), 0))


def _discounted_sums(values: Tensor, decay: float) -> Tensor:
    """Sₜ = xₜ + decay · Sₜ₊₁ along the last dimension, in O(log N) calls.

    Inside a block, after k rounds each place holds the sum of the 2ᵏ terms that start there. Then the blocks' totals, a sequence that is
    shorter by the block's length and decays by decay^block, are summed in the same way and carried over. Only powers of decay ≤ 1 occur, so
    nothing overflows; and no matrix product, which TF32, bf16 or autocast could round.
    """
    rows, width = values.shape
    if decay == 0 or width <= 1:
        return values
    block = min(width, _BLOCK)
    blocks = -(-width // block)
    sums = torch.nn.functional.pad(values, (0, blocks * block - width)).view(rows, blocks, block)
    reach = 1
    while reach < block:
        longer = sums.clone()
        longer[..., :-reach].add_(sums[..., reach:], alpha=decay**reach)
        sums, reach = longer, 2 * reach
    if blocks > 1:
        totals = _discounted_sums(sums[:, :, 0].contiguous(), decay**block)
        distance = torch.arange(block, 0, -1, dtype=values.dtype, device=values.device)
        sums[:, :-1].addcmul_(totals[:, 1:, None], torch.pow(decay, distance))
    return sums.view(rows, -1)[:, :width]


def _wide(values: Tensor) -> torch.dtype:
    """The dtype of sums: float64, which autocast and TF32 leave alone too; float32 on Apple's GPU, which has nothing wider."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def _check_mask(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool, got {str(mask.dtype).removeprefix('torch.')}; compare it with 0 first")
    if mask.dim() != 2:
        raise ShapeError(f"mask must be [B, T], got {tuple(mask.shape)}; a single response needs a leading dimension of 1")


def _check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    _check_mask(mask)
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ShapeError(f"{name} must be [B, T] = {tuple(mask.shape)} like mask; got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {str(tensor.dtype).removeprefix('torch.')}; convert it with .float()")


def _check_rows(mask: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape[:1]:
            raise ShapeError(f"{name} must be [B] = {tuple(mask.shape[:1])}, one number per row of mask; got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {str(tensor.dtype).removeprefix('torch.')}; convert it with .float()")


def _check_unit(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} must be between 0 and 1, got {value}")

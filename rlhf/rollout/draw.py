"""Drawing the next token: one vectorised pass over the logits of all rows, each with options and randomness of its own.

The random number of a token depends on its row's seed and its index in the response alone, so a sample does not change with the
rows it happens to share a batch with.

Legend: n rows, V vocabulary, m filtered rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rlhf.rollout.sampling import SamplingParams

BLOCK = 256
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_LEAST_TEMPERATURE = 1e-30  # float32 rounds what is far below to 0


class DrawOptions(NamedTuple):
    """Sampling options of n rows as tensors; None where they change nothing for any row, so that no step need look.

    Attributes:
        temperature: float32 [n], 1 for greedy rows.
        greedy: bool [n], rows that take the most likely token.
        all_greedy: whether every row does.
        filtered: int64 [m], rows with top-p, top-k or min-p; `top_p`, `top_k` and `min_p` are [m].
    """

    temperature: Tensor | None = None
    greedy: Tensor | None = None
    all_greedy: bool = False
    filtered: Tensor | None = None
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    min_p: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device | str = "cpu") -> Self:
        """The options of these rows, one SamplingParams a row, on `device`."""
        greedy = [row.temperature == 0 for row in rows]
        temperatures = [max(row.temperature, _LEAST_TEMPERATURE) if row.temperature else 1.0 for row in rows]
        filtered = [i for i, row in enumerate(rows) if row.filtered]
        options = cls(
            temperature=torch.tensor(temperatures, device=device) if any(t != 1 for t in temperatures) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
        )
        if not filtered:
            return options
        return options._replace(
            filtered=torch.tensor(filtered, device=device),
            top_p=torch.tensor([rows[i].top_p for i in filtered], dtype=torch.float64, device=device),
            top_k=torch.tensor([rows[i].top_k for i in filtered], device=device),
            min_p=torch.tensor([rows[i].min_p for i in filtered], dtype=torch.float32, device=device),
        )


def draw(logits: Tensor, uniform: Tensor, options: DrawOptions, forbidden: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Sample one token a row.

    Args:
        logits: float32 [n, V]; overwritten, since another copy of a large vocabulary costs as much as the draw.
        uniform: float64 [n] in [0, 1).
        options: of the n rows.
        forbidden: tokens not to be taken, as (row, token) pairs, both int64 [pairs]; this does not touch log-probabilities.

    Returns:
        tokens: int64 [n].
        logprobs: float32 [n], log_softmax(logits / temperature) over the whole vocabulary (temperature 0 scores as 1), whatever was
            filtered.
    """
    # scaled after the shift: at a tiny temperature logits / temperature would overflow or lose its last digits
    scaled = logits.sub_(logits.amax(-1, keepdim=True))
    if options.temperature is not None:
        scaled.div_(options.temperature[:, None])
    weights = scaled.exp()
    sums = _block_sums(weights)
    log_total = sums.sum(-1).log()
    if forbidden is not None:
        scaled[forbidden] = -torch.inf
        weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()  # the forbidden may have had all the weight
    if options.all_greedy:
        tokens = scaled.argmax(-1)
    else:
        if options.filtered is not None:
            weights[options.filtered] = _filter(weights[options.filtered], options.top_p, options.top_k, options.min_p)
        if options.filtered is not None or forbidden is not None:
            sums = _block_sums(weights)
        tokens = _inverse_cdf(weights, sums, uniform)
        if options.greedy is not None:
            tokens = torch.where(options.greedy, scaled.argmax(-1), tokens)
    return tokens, (scaled.gather(-1, tokens[:, None]).squeeze(-1) - log_total).float()


def _filter(weights: Tensor, top_p: Tensor | None, top_k: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Unnormalised probabilities with all but the kept tokens at 0; top-k first, then top-p of what it leaves, then min-p."""
    assert top_p is not None
    assert top_k is not None
    assert min_p is not None
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), 0.0)
    exact = ordered.double()
    before = exact.cumsum(-1) - exact
    # the smallest set that reaches top_p: a token stays while the mass before it falls short
    ordered = ordered.masked_fill((top_p < 1)[:, None] & (before >= top_p[:, None] * exact.sum(-1, keepdim=True)), 0.0)
    ordered = ordered.masked_fill(ordered < min_p[:, None] * ordered[:, :1], 0.0)
    return torch.zeros_like(weights).scatter_(-1, index, ordered)


def _block_sums(weights: Tensor) -> Tensor:
    """float64 [n, ceil(V / BLOCK)], the sum of each BLOCK tokens of weights [n, V]; the last block may be shorter."""
    whole = weights.shape[1] // BLOCK
    sums = weights[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).sum(-1)
    if whole * BLOCK < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole * BLOCK :].sum(-1, keepdim=True)], 1)
    return sums.double()


def _inverse_cdf(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """Index [n] where the cumulated weights [n, V] pass uniform × total: first the block, then the token inside it."""
    block_ends = sums.cumsum(-1)
    target = (uniform * block_ends[:, -1])[:, None]
    block = _first_above(block_ends, target)
    tokens = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    size = weights.shape[1]
    chosen = weights.gather(1, tokens.clamp(max=size - 1)).double()
    if size % BLOCK:
        chosen.masked_fill_(tokens >= size, 0.0)
    before = block_ends.gather(-1, block) - sums.gather(-1, block)
    return (block * BLOCK + _first_above(chosen.cumsum(-1), target - before)).clamp_(max=size - 1).squeeze(-1)


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """int64 [n, 1], the first entry of the rising `ends` [n, m] above the target: one that adds to the sum, whatever rounding did."""
    target = torch.minimum(target, ends[:, -1:] * (1 - 1e-12)).clamp_(min=0)
    return torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)  # NaN lies above all ends


def row_seeds(seed: int, count: int) -> Tensor:
    """int64 [count], one seed for every response of a call."""
    return _mix(torch.full((count,), _to_int64(seed)) + _GOLDEN * torch.arange(1, count + 1))


def uniforms(seeds: Tensor, steps: Tensor) -> Tensor:
    """float64 in [0, 1): the random number of token `steps` of the rows with these seeds (int64, shapes that broadcast).

    Source: SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    """
    bits = _mix(seeds + _GOLDEN * (steps + 1))
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_int64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value

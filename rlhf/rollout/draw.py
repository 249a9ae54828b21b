"""Drawing the next token: one vectorised pass over the logits of all rows, each with options and randomness of its own.

The random number of a token depends on its row's seed and its index in the response alone, so a sample does not change with the
rows it happens to share a batch with.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


class DrawOptions(NamedTuple):
    """Per-row sampling options, each [n]: see `SamplingParams`. `forbidden` is bool [n, V] or None."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    forbidden: Tensor | None = None


def draw(logits: Tensor, uniform: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    """Sample one token a row.

    Args:
        logits: float32 [n, V].
        uniform: float64 [n] in [0, 1).
        options: temperature 0 takes the most likely token.

    Returns:
        tokens: int64 [n].
        logprobs: float32 [n], log_softmax(logits / temperature) over the whole vocabulary (temperature 0 scores as 1), whatever was
            filtered.
    """
    greedy = options.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, options.temperature)[:, None]
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    log_total = weights.sum(-1).log() + top.squeeze(-1)
    allowed = weights if options.forbidden is None else weights.masked_fill(options.forbidden, 0.0)
    filtered = ~greedy & ((options.top_p < 1) | (options.top_k > 0) | (options.min_p > 0))
    if filtered.any():
        allowed = allowed.clone() if allowed is weights else allowed
        allowed[filtered] = _filter(allowed[filtered], options.top_p[filtered], options.top_k[filtered], options.min_p[filtered])
    tokens = _inverse_cdf(allowed, uniform)
    if greedy.any():
        best = scaled if options.forbidden is None else scaled.masked_fill(options.forbidden, -torch.inf)
        tokens = torch.where(greedy, best.argmax(-1), tokens)
    return tokens, scaled.gather(-1, tokens[:, None]).squeeze(-1) - log_total


def _filter(weights: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Unnormalised probabilities with all but the kept tokens at 0; top-k first, then top-p of what it leaves, then min-p."""
    ordered, index = weights.sort(-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered.masked_fill((top_k > 0)[:, None] & (rank >= top_k[:, None]), 0.0)
    before = ordered.double().cumsum(-1) - ordered.double()
    # the smallest set that reaches top_p: a token stays while the mass before it falls short
    ordered = ordered.masked_fill((top_p < 1)[:, None] & (before >= top_p[:, None].double() * ordered.double().sum(-1, keepdim=True)), 0.0)
    ordered = ordered.masked_fill(ordered < min_p[:, None] * ordered[:, :1], 0.0)
    return torch.zeros_like(weights).scatter_(-1, index, ordered)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [n] where the cumulated weights [n, V] pass uniform × total: first the block, then the token inside it."""
    rows, size = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK))
    blocks = padded.view(rows, -1, BLOCK)
    block_ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # strictly below the total, so that rounding never selects the padding or a token of weight 0 at the end
    target = (uniform * block_ends[:, -1]).clamp(max=block_ends[:, -1] * (1 - 1e-12))
    block = torch.searchsorted(block_ends, target[:, None], right=True).clamp_(max=block_ends.shape[1] - 1)
    start = torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double()
    ends = chosen.cumsum(-1)
    inside = torch.searchsorted(ends, (target[:, None] - start).clamp_(min=0), right=True)
    # the last token of the block that has weight, where summation order lets the target slip past it
    positions = torch.arange(BLOCK, device=weights.device)
    last = torch.where(chosen > 0, positions, 0).amax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(inside, last)).squeeze(-1)


def row_seeds(seed: int, count: int) -> Tensor:
    """int64 [count], one seed for every response of a call."""
    return _mix(torch.full((count,), _to_int64(seed)) + _GOLDEN * torch.arange(1, count + 1))


def uniforms(seeds: Tensor, steps: Tensor) -> Tensor:
    """float64 [n] in [0, 1): the random number of token `steps` (int64 [n]) of the rows with these seeds (int64 [n]).

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

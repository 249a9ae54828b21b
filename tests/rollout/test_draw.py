"""The sampler: what may be drawn, how often, and what it is said to have cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.rollout import SamplingParams
from rlhf.rollout import draw as draw_module
from rlhf.rollout.draw import BLOCK, DrawOptions, row_seeds, uniforms

FILTERS = [
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_k": 1},
    {"top_k": 7},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 10},
    {"top_p": 0.7, "min_p": 0.2},
    {"top_p": 0.9, "top_k": 5, "min_p": 0.3},
    {"top_p": 1e-9},
    {"top_k": 10_000},
]


def _logits(rows: int, size: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def _options(count: int, **fields: Any) -> DrawOptions:
    return DrawOptions.of([SamplingParams(**fields)] * count)


def draw(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_module.draw(logits.clone(), *args)  # it overwrites them


def _kept(logits: np.ndarray, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> np.ndarray:
    """Probabilities [V] after the filters, one token at a time, in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k > 0:
        order = order[:top_k]
    mass = sum(p[i] for i in order)
    if top_p < 1:
        nucleus, reached = [], 0.0
        for i in order:
            if reached >= top_p * mass:
                break
            nucleus.append(i)
            reached += p[i]
        order = nucleus
    order = [i for i in order if p[i] >= min_p * p[order[0]]]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


def _sweep(logits: torch.Tensor, draws: int, **fields: Any) -> torch.Tensor:
    """Tokens drawn from logits [V] at `draws` evenly spaced random numbers: exact frequencies, to one in `draws` a token."""
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    return draw(logits.expand(draws, -1), uniform, _options(draws, **fields))[0]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_filters_keep_exactly_the_tokens_and_proportions_of_their_definition(fields: dict[str, Any], temperature: float) -> None:
    logits = _logits(1, 40, seed=3)[0]
    expected = _kept(logits.numpy(), temperature=temperature, **fields)
    counts = torch.bincount(_sweep(logits, 5_000, temperature=temperature, **fields), minlength=40).numpy()
    # a token's share of an even sweep differs from its probability by less than one draw at either end
    assert np.abs(counts - 5_000 * expected).max() <= 2
    assert not counts[expected == 0].any()


def test_the_logprob_is_over_the_whole_vocabulary_whatever_is_filtered_or_forbidden() -> None:
    logits = _logits(6, 1000)
    rows = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.4),
        SamplingParams(min_p=0.5),
        SamplingParams(temperature=0.0, top_p=0.1),
        SamplingParams(temperature=0.3),
    ]
    forbidden = (torch.tensor([0, 3, 4]), logits[[0, 3, 4]].argmax(-1))
    tokens, logprobs = draw(logits, torch.full((6,), 0.37, dtype=torch.float64), DrawOptions.of(rows), forbidden)
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float64)
    expected = (logits.double() / temperatures[:, None]).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-6, rtol=1e-6)


def test_greedy_rows_take_the_most_likely_token_beside_sampled_ones() -> None:
    logits = _logits(4, 300)
    rows = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0, top_k=5), SamplingParams(top_p=0.5)]
    uniform = torch.tensor([0.9, 0.0, 0.9, 0.2], dtype=torch.float64)
    tokens, _ = draw(logits, uniform, DrawOptions.of(rows))
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert tokens[1] == 0  # the very first token at a random number of 0
    alone = [draw(logits[i : i + 1], uniform[i : i + 1], DrawOptions.of(rows[i : i + 1]))[0].item() for i in range(4)]
    assert tokens.tolist() == alone


def test_options_that_change_nothing_are_left_out() -> None:
    assert DrawOptions.of([SamplingParams(), SamplingParams()]) == DrawOptions()
    assert DrawOptions.of([SamplingParams(temperature=0, top_p=0.5)]).filtered is None
    assert DrawOptions.of([SamplingParams(temperature=0)]).all_greedy


@pytest.mark.parametrize("size", [2, BLOCK, BLOCK + 1, 1000])
def test_frequencies_follow_the_probabilities(size: int) -> None:
    logits, draws = _logits(1, size, seed=size)[0], 100_000
    uniform = uniforms(row_seeds(11, draws), torch.zeros(1, dtype=torch.int64))
    tokens = torch.cat([draw(logits.expand(len(part), -1), part, _options(len(part)))[0] for part in uniform.split(10_000)])
    expected = draws * logits.double().softmax(-1)
    common = expected >= 5
    counts = torch.bincount(tokens, minlength=size).double()
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    # the seed is fixed; 5 standard deviations of a chi-square would fail by chance once in a million seeds
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    assert abs(float(counts[~common].sum() - expected[~common].sum())) < 5 * math.sqrt(float(expected[~common].sum()) + 1)


@pytest.mark.parametrize("temperature", [1e-44, 1e-6, 0.01, 100.0])
def test_extreme_temperatures_give_finite_logprobs(temperature: float) -> None:
    logits = _logits(8, 500, scale=30.0)
    tokens, logprobs = draw(logits, torch.linspace(0, 0.999, 8, dtype=torch.float64), _options(8, temperature=temperature))
    assert logprobs.isfinite().all()
    assert (logprobs <= 0).all()
    if temperature <= 1e-6:
        assert tokens.tolist() == logits.argmax(-1).tolist()
        assert logprobs.tolist() == [0.0] * 8
    else:
        expected = (logits.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-6)


def test_a_vocabulary_of_one_token_gives_it_at_no_cost() -> None:
    tokens, logprobs = draw(torch.tensor([[3.0], [-7.0]]), torch.tensor([0.0, 0.99]).double(), _options(2, top_p=0.5))
    assert (tokens.tolist(), logprobs.tolist()) == ([0, 0], [0.0, 0.0])


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 2 * BLOCK + 3, 152_064, 151_936])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_weight_is_never_drawn(size: int, uniform: float) -> None:
    logits = torch.full((3, size), -torch.inf)
    logits[0, size - 1] = 0.0  # all mass at the very end
    logits[1, 0] = 0.0
    logits[2, [5, size // 2]] = torch.tensor([-80.0, 1.0])  # next to no mass, then much
    logits[2, size - 1] = -200.0  # underflows to nothing
    tokens, logprobs = draw(logits, torch.full((3,), uniform, dtype=torch.float64), _options(3))
    assert tokens[:2].tolist() == [size - 1, 0]
    assert tokens[2] == (5 if uniform == 0 else size // 2)
    assert logprobs.isfinite().all()


def test_the_largest_random_number_stays_inside_the_support() -> None:
    """Block sums and sums inside a block round differently; the seam must not let a token of weight 0 through."""
    uniform = torch.full((200,), 1 - 2**-53, dtype=torch.float64)
    for size in (300, 1000, 5000):
        logits = _logits(200, size, seed=size, scale=6.0)
        logits[:, size - 40 :] = -torch.inf
        tokens, logprobs = draw(logits, uniform, _options(200))
        assert (tokens < size - 40).all()
        assert logprobs.isfinite().all()


def test_forbidden_tokens_are_not_drawn_and_the_rest_keeps_its_proportions() -> None:
    logits, draws = torch.tensor([0.0, 1.0, 2.0, 0.5]), 20_000
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    forbidden = (torch.arange(draws), torch.full((draws,), 2))
    tokens, _ = draw(logits.expand(draws, -1), uniform, _options(draws), forbidden)
    weights = logits.double().exp() * torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert (torch.bincount(tokens, minlength=4) - draws * weights / weights.sum()).abs().max() <= 2
    filtered, _ = draw(logits.expand(draws, -1), uniform, _options(draws, top_k=1), forbidden)
    assert filtered.unique().tolist() == [1]


def test_tokens_are_drawn_by_their_proportions_even_if_the_forbidden_had_all_the_weight() -> None:
    logits = torch.tensor([300.0, 1.0, 0.0]).repeat(1000, 1)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, logprobs = draw(logits, uniform, _options(1000), (torch.arange(1000), torch.zeros(1000, dtype=torch.int64)))
    assert torch.bincount(tokens).tolist() == [0, 731, 269]  # 1 / (1 + 1/e)
    assert set(logprobs.tolist()) == {-299.0, -300.0}


def test_random_numbers_are_uniform_and_independent_over_steps_rows_and_calls() -> None:
    grid = uniforms(row_seeds(0, 500)[:, None], torch.arange(400))  # 200,000 numbers, [row, step]
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = torch.histc(grid.float(), bins=100, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 99 + 5 * math.sqrt(2 * 99)
    other_call = uniforms(row_seeds(1, 500)[:, None], torch.arange(400))
    for a, b in [(grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]), (grid, other_call), (grid[:, 200:], grid[:, :200])]:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / math.sqrt(a.numel())
    assert len(grid.unique()) > 199_990


def test_random_numbers_depend_on_row_and_step_alone() -> None:
    seeds = row_seeds(2**62 - 1, 4)
    assert torch.equal(seeds, row_seeds(2**62 - 1, 9)[:4])
    assert len(seeds.unique()) == 4
    grid = uniforms(seeds[:, None], torch.arange(5))
    assert grid[2, 3] == uniforms(seeds[2:3], torch.tensor([3]))[0]


def test_splitmix64_gives_its_published_numbers() -> None:
    """First outputs of the reference implementation in C for the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(torch.tensor([1234567]), torch.arange(3))
    assert got.tolist() == [(value >> 11) * 2.0**-53 for value in expected]

"""Advantages equal their definitions, whatever stands in the padding, and wherever the holes are."""

from __future__ import annotations

import math
import time

import pytest
import torch

from rlhf.errors import ConfigError, RLHFError, ShapeError
from rlhf.ppo import gae, grpo, masked_mean, opo, reinforce_plus_plus, remax, rloo, whiten

# Float64 sums of at most a few hundred terms of order 1.
EXACT = {"rtol": 0.0, "atol": 1e-10}
# Tables below are printed to this many digits.
TABLE = {"rtol": 0.0, "atol": 1e-6}


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def brute_force(rewards, values, mask, gamma, lam, bootstrap=None):
    """The sum over pairs of tokens, row by row: Aᵢ = Σⱼ (γλ)ʲ⁻ⁱ δⱼ."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[b, t]]
        if not places:
            continue
        received = dict.fromkeys(places, 0.0)
        for t in range(mask.shape[1]):
            if math.isfinite(rewards[b, t]):
                received[max((p for p in places if p <= t), default=places[0])] += float(rewards[b, t])
        v = [float(values[b, p]) for p in places] + [0.0 if bootstrap is None else float(bootstrap[b])]
        deltas = [received[p] + gamma * v[i + 1] - v[i] for i, p in enumerate(places)]
        for i, p in enumerate(places):
            advantages[b, p] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(places)))
            returns[b, p] = advantages[b, p] + v[i]
    return advantages, returns


def ragged(seed: int, rows: int = 7, width: int = 90, holes: float = 0.3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) >= holes)
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(2))
    return rewards, values, mask, torch.randn(rows, generator=generator, dtype=dtype)


# ------------------------------------------------------------------ GAE


@pytest.mark.parametrize(
    ("lam", "advantages", "returns"),
    [
        (0.95, (0.46575, 0.385, 0.3), (0.96575, 0.985, 1.0)),
        (1.0, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0)),
        (0.0, (0.1, 0.1, 0.3), (0.6, 0.7, 1.0)),
    ],
)
def test_a_terminal_reward_gives_the_table_worked_out_by_hand(lam, advantages, returns):
    result = gae(row(0, 0, 1), row(0.5, 0.6, 0.7), counts(1, 1, 1), lam=lam)
    torch.testing.assert_close(result.advantages, row(*advantages), **TABLE)
    torch.testing.assert_close(result.returns, row(*returns), **TABLE)


def test_a_discount_acts_on_value_and_on_credit():
    # δ = 1 − .5 + .9·.4 = .86, then 2 − .4 = 1.6; A₀ = .86 + .9·.5·1.6 = 1.58
    result = gae(row(1, 2), row(0.5, 0.4), counts(1, 1), gamma=0.9, lam=0.5)
    torch.testing.assert_close(result.advantages, row(1.58, 1.6), **TABLE)
    torch.testing.assert_close(result.returns, row(2.08, 2.0), **TABLE)


def test_a_penalty_by_token_and_a_score_at_the_end_add_up():
    result = gae(row(-0.005, 0.01, 0.985), row(0.2, 0.4, 0.6), counts(1, 1, 1), lam=0.95)
    torch.testing.assert_close(result.advantages, row(0.7419625, 0.57575, 0.385), **TABLE)


def test_a_critics_value_in_the_padding_does_not_bootstrap_real_tokens():
    result = gae(row(0, 1, 0), row(0, 0, 100), counts(1, 1, 0), lam=0.95)
    torch.testing.assert_close(result.advantages, row(0.95, 1, 0), **TABLE)
    torch.testing.assert_close(result.returns, row(0.95, 1, 0), **TABLE)


@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.0, 0.7), (0.9, 0.0), (0.5, 0.5)])
def test_gae_equals_the_quadratic_brute_force(gamma, lam, holes):
    rewards, values, mask, after = ragged(seed=int(100 * gamma + 10 * lam), holes=holes)
    for bootstrap in (None, after):
        result = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
        advantages, returns = brute_force(rewards, values, mask, gamma, lam, bootstrap)
        torch.testing.assert_close(result.advantages, advantages, **EXACT)
        torch.testing.assert_close(result.returns, returns, **EXACT)


@pytest.mark.parametrize("width", [0, 1, 2, 31, 32, 33, 64, 65, 1024, 1025, 1100])
def test_gae_is_exact_at_the_edges_of_its_blocks(width):
    generator = torch.Generator().manual_seed(width)
    rewards, values = (torch.randn(2, width, generator=generator, dtype=torch.float64) for _ in range(2))
    result = gae(rewards, values, torch.ones(2, width, dtype=torch.bool), gamma=0.999, lam=0.99)
    expected = torch.zeros_like(rewards)
    last = torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(width)):
        after = values[:, t + 1] if t + 1 < width else 0.0
        last = rewards[:, t] + 0.999 * after - values[:, t] + 0.999 * 0.99 * last
        expected[:, t] = last
    torch.testing.assert_close(result.advantages, expected, **EXACT)


def test_with_lambda_1_the_advantage_is_return_minus_value():
    rewards, values, mask, _ = ragged(1, holes=0.0)
    rewards = rewards * mask
    result = gae(rewards, values, mask)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(result.advantages, torch.where(mask, to_go - values, 0), **EXACT)
    torch.testing.assert_close(result.returns, torch.where(mask, to_go, 0), **EXACT)


def test_with_gamma_0_only_the_next_reward_counts():
    rewards, values, mask, _ = ragged(2, holes=0.0)
    result = gae(rewards * mask, values, mask, gamma=0.0, lam=0.9)
    torch.testing.assert_close(result.advantages, torch.where(mask, rewards - values, 0), **EXACT)


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_a_hole_costs_nothing(lam):
    result = gae(row(1, 0, 0, 2, 3), row(0.5, 9, -9, 0.25, 1), counts(1, 0, 0, 1, 1), gamma=0.9, lam=lam)
    without = gae(row(1, 2, 3), row(0.5, 0.25, 1), counts(1, 1, 1), gamma=0.9, lam=lam)
    torch.testing.assert_close(result.advantages[:, [0, 3, 4]], without.advantages, **EXACT)
    torch.testing.assert_close(result.returns[:, [0, 3, 4]], without.returns, **EXACT)
    assert not result.advantages[:, 1:3].any()


@pytest.mark.parametrize(
    ("rewards", "mask", "moved"),
    [
        ((0, 0, 5, 0), (1, 1, 0, 1), (0, 5, 0, 0)),  # behind a tool call: to the token that made it
        ((0, 0, 0, 5), (1, 1, 1, 0), (0, 0, 5, 0)),  # on padding: to the last token
        ((5, 0, 1, 0), (0, 1, 1, 0), (0, 5, 1, 0)),  # before the first token that counts: to that one
        ((2, 3, 4, 5), (0, 0, 1, 0), (0, 0, 14, 0)),  # all of them to the only one
    ],
)
def test_a_reward_on_a_masked_token_moves_to_one_that_counts(rewards, mask, moved):
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    for gamma in (1.0, 0.5):
        result = gae(row(*rewards), zeros, counts(*mask), gamma=gamma)
        expected = gae(row(*moved), zeros, counts(*mask), gamma=gamma)
        torch.testing.assert_close(result.advantages, expected.advantages, **EXACT)
    returns = reinforce_plus_plus(row(*rewards), counts(*mask)).returns
    assert float(returns.max()) == sum(rewards)  # the first token's return: nothing was lost


def test_an_empty_response_stays_zero():
    result = gae(row(1, 2, 3), row(4, 5, 6), counts(0, 0, 0), bootstrap=torch.ones(1, dtype=torch.float64))
    assert not result.advantages.any()
    assert not result.returns.any()


def test_the_value_after_a_truncated_response_is_used_where_it_ends():
    rewards, values = row(0, 1, 0).repeat(2, 1), row(0.5, 0.25, 0).repeat(2, 1)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    result = gae(rewards, values, mask, lam=0.0, bootstrap=torch.tensor([2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.25, 2.75, 0], [-0.25, 0.75, 0]], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_garbage_where_the_mask_is_false_changes_nothing(garbage, holes):
    rewards, values, mask, after = ragged(3, holes=holes)
    rewards = rewards * mask
    clean = gae(rewards, values * mask, mask, gamma=0.9, lam=0.9, bootstrap=after)
    dirty_rewards = rewards if math.isfinite(garbage) else torch.where(mask, rewards, garbage)
    dirty = gae(dirty_rewards, torch.where(mask, values, garbage), mask, gamma=0.9, lam=0.9, bootstrap=after)
    for a, b in zip(clean, dirty, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
        assert not a[~mask].any()
        assert not b[~mask].any()


@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_a_nan_on_a_token_that_counts_is_not_hidden(holes):
    rewards, values, mask, _ = ragged(4, holes=holes)
    mask[0, :3] = True
    values[0, 1] = math.nan
    result = gae(rewards * mask, values, mask, lam=0.9)
    assert result.advantages[0, :2].isnan().all()
    assert result.advantages[1:].isfinite().all()


def test_rows_do_not_know_of_each_other():
    rewards, values, mask, after = ragged(5, rows=9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    whole = gae(rewards, values, mask, lam=0.9, bootstrap=after)
    permuted = gae(rewards[order], values[order], mask[order], lam=0.9, bootstrap=after[order])
    torch.testing.assert_close(permuted.advantages, whole.advantages[order], **EXACT)
    for b in range(9):
        alone = gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], lam=0.9, bootstrap=after[b : b + 1])
        torch.testing.assert_close(alone.advantages[0], whole.advantages[b], **EXACT)


def test_extra_padding_changes_nothing():
    rewards, values, mask, _ = ragged(6)
    wider = [torch.nn.functional.pad(x, (0, 40)) for x in (rewards, values, mask)]
    torch.testing.assert_close(gae(*wider, lam=0.9).advantages[:, :90], gae(rewards, values, mask, lam=0.9).advantages, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_stays_and_no_graph_is_kept(dtype):
    rewards, values, mask, _ = ragged(7, dtype=torch.float64)
    expected = gae(rewards.to(dtype).double(), values.to(dtype).double(), mask, lam=0.9)
    result = gae(rewards.to(dtype), values.to(dtype).requires_grad_(), mask, lam=0.9)
    assert result.advantages.dtype == result.returns.dtype == dtype
    assert not result.advantages.requires_grad
    relative = torch.finfo(dtype).eps  # one rounding of the result; inside, bfloat16 is summed in float32
    torch.testing.assert_close(
        result.advantages.double(), expected.advantages, rtol=2 * relative, atol=1e-5 if dtype != torch.float64 else 1e-10
    )


def test_inputs_are_left_as_they_were():
    rewards, values, mask, after = ragged(8)
    copies = [x.clone() for x in (rewards, values, mask, after)]
    gae(rewards, values, mask, gamma=0.9, lam=0.9, bootstrap=after)
    gae(rewards * mask, values, torch.ones_like(mask), gamma=0.9, lam=0.9, bootstrap=after)
    assert all(torch.equal(a, b) for a, b in zip(copies, (rewards, values, mask, after), strict=True))


def test_gae_is_far_faster_than_a_loop_over_tokens():
    rewards, values = torch.randn(256, 2048), torch.randn(256, 2048)
    mask = torch.ones(256, 2048, dtype=torch.bool)

    def loop():
        last, out = torch.zeros(256), []
        for t in reversed(range(2048)):
            after = values[:, t + 1] if t < 2047 else 0.0
            last = rewards[:, t] + after - values[:, t] + 0.95 * last
            out.append(last)
        return torch.stack(out[::-1], 1)

    def fastest(work):
        times = []
        for _ in range(4):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
        return min(times)

    # Four to eight times on a free core, more with longer responses; half of that leaves room for a busy one.
    assert fastest(lambda: gae(rewards, values, mask, lam=0.95)) < fastest(loop) / 2


# ------------------------------------------------------------------ REINFORCE++


def test_reinforce_plus_plus_is_the_discounted_return_without_whitening():
    result = reinforce_plus_plus(row(1, 0, 2, 7), counts(1, 1, 1, 0), gamma=0.5)
    # the 7 behind the end belongs to the last token: 9, then 4.5, then 3.25
    torch.testing.assert_close(result.advantages, row(3.25, 4.5, 9, 0), **EXACT)
    torch.testing.assert_close(result.returns, result.advantages, **EXACT)


def test_reinforce_plus_plus_is_gae_with_values_of_zero():
    rewards, values, mask, _ = ragged(9)
    result = reinforce_plus_plus(rewards, mask, gamma=0.95)
    torch.testing.assert_close(result.returns, gae(rewards, torch.zeros_like(values), mask, gamma=0.95).returns, **EXACT)


# ------------------------------------------------------------------ groups

ONE = torch.ones(8, 1, dtype=torch.bool)


def group_advantages(function, scores, group, **options):
    scores = torch.as_tensor(scores, dtype=torch.float64)
    return function(scores, torch.as_tensor(group), torch.ones(len(scores), 1, dtype=torch.bool), **options).advantages[:, 0]


def close(got, expected, tolerance=1e-6):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=tolerance)


def test_grpo_with_either_deviation_gives_the_known_numbers():
    close(group_advantages(grpo, [1, 0, 1, 0], [0] * 4, ddof=0, eps=1e-4), [0.9998, -0.9998, 0.9998, -0.9998], 1e-7)
    close(group_advantages(grpo, [1, 0, 1, 0], [0] * 4, eps=1e-4), [0.8658754, -0.8658754, 0.8658754, -0.8658754])


def test_statistics_are_those_of_the_group_not_of_the_batch():
    expected = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
    close(group_advantages(grpo, [1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, scale="none"), expected)


def test_groups_go_by_id_in_any_order_and_of_any_size():
    scores, group = [1.0, 5.0, 0.0, 7.0, 2.0, 6.0], [-3, 900, -3, 900, -3, 900]
    close(group_advantages(grpo, scores, group, scale="none"), [0, -1, -1, 1, 1, 0])
    close(group_advantages(rloo, scores, group), [0, -1.5, -1.5, 1.5, 1.5, 0])


def test_two_groups_of_the_same_prompt_text_stay_apart():
    close(group_advantages(grpo, [1, 1, 0, 0], [0, 0, 1, 1]), [0, 0, 0, 0], 0)


@pytest.mark.parametrize("function", [grpo, rloo, lambda s, g, m: opo(s, g, torch.arange(1, len(s) + 1), m)], ids=["grpo", "rloo", "opo"])
@pytest.mark.parametrize("score", [0.9, 1 / 3, 1e-7, -123.456, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_a_group_of_equal_scores_gets_exactly_zero_in_float32(function, score, size):
    result = function(torch.full((size,), score), torch.zeros(size, dtype=torch.int64), torch.ones(size, 2, dtype=torch.bool))
    assert torch.equal(result.advantages, torch.zeros(size, 2))
    assert result.advantages.dtype == torch.float32


@pytest.mark.parametrize("function", [grpo, rloo], ids=["grpo", "rloo"])
@pytest.mark.parametrize("size", [3, 6, 7, 10])
def test_a_group_of_equal_scores_gets_exactly_zero_in_float64(function, size):
    # float32 scores have exact float64 means; 0.1 in float64 has not
    scores = torch.full((size,), 0.1, dtype=torch.float64)
    assert not function(scores, torch.zeros(size, dtype=torch.int64), torch.ones(size, 1, dtype=torch.bool)).advantages.any()


def test_a_tiny_eps_does_not_wake_rounding_noise():
    scores = torch.full((16,), 1 / 3)
    result = grpo(scores, torch.arange(16) // 8, torch.ones(16, 1, dtype=torch.bool), eps=1e-8)
    assert not result.advantages.any()


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_an_unknown_score_leaves_its_groups_statistics(unknown):
    close(group_advantages(grpo, [1, unknown, 0, 1], [0] * 4, scale="none"), [1 / 3, 0, -2 / 3, 1 / 3])
    # baseline 2, deviation 1
    close(group_advantages(grpo, [unknown, 1, 2, 3], [0] * 4, eps=0.0), [0, -1, 0, 1])
    close(group_advantages(rloo, [unknown, 1, 2, 3], [0] * 4), [0, -1.5, 0, 1.5])
    close(group_advantages(grpo, [unknown, 5], [0, 0]), [0, 0], 0)
    close(group_advantages(grpo, [unknown, unknown], [0, 0]), [0, 0], 0)


def test_rloo_compares_with_the_mean_of_the_others():
    close(group_advantages(rloo, [1, 2, 6], [0, 0, 0]), [1 - 4, 2 - 3.5, 6 - 1.5])


def test_opo_weighs_the_baseline_by_length():
    scores, lengths = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([3, 1])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    result = opo(scores, torch.tensor([4, 4]), lengths, mask)
    torch.testing.assert_close(result.advantages, torch.tensor([[0.25, 0.25, 0.25], [-0.75, 0, 0]], dtype=torch.float64), **EXACT)


def test_remax_compares_with_the_greedy_response():
    scores, baselines = torch.tensor([1.0, 0.0, math.nan]), torch.tensor([0.25, 0.5, 0.0])
    result = remax(scores, baselines, torch.tensor([[True, True], [True, False], [True, True]]))
    assert result.advantages.tolist() == [[0.75, 0.75], [-0.5, 0.0], [0.0, 0.0]]
    assert result.returns.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_group_estimators_do_not_mind_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    scores, group = torch.randn(30, generator=generator, dtype=torch.float64), torch.randint(0, 6, (30,), generator=generator)
    mask = torch.rand(30, 5, generator=generator) > 0.4
    order = torch.randperm(30, generator=generator)
    lengths = mask.sum(1)
    for whole, permuted in (
        (grpo(scores, group, mask), grpo(scores[order], group[order], mask[order])),
        (rloo(scores, group, mask), rloo(scores[order], group[order], mask[order])),
        (opo(scores, group, lengths, mask), opo(scores[order], group[order], lengths[order], mask[order])),
    ):
        torch.testing.assert_close(permuted.advantages, whole.advantages[order], **EXACT)
        assert not whole.advantages[~mask].any()


@pytest.mark.parametrize("seed", range(5))
def test_group_estimators_equal_a_loop_over_groups(seed):
    generator = torch.Generator().manual_seed(seed)
    scores, group = torch.randn(20, generator=generator, dtype=torch.float64), torch.randint(0, 7, (20,), generator=generator)
    std, centred, left_out = torch.zeros(20).double(), torch.zeros(20).double(), torch.zeros(20).double()
    for i in range(20):
        others = [float(scores[j]) for j in range(20) if group[j] == group[i] and j != i]
        if others:
            mean = (sum(others) + float(scores[i])) / (len(others) + 1)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in [*others, float(scores[i])]) / len(others))
            centred[i] = scores[i] - mean
            std[i] = centred[i] / (deviation + 1e-6)
            left_out[i] = scores[i] - sum(others) / len(others)
    torch.testing.assert_close(group_advantages(grpo, scores, group), std, **EXACT)
    torch.testing.assert_close(group_advantages(grpo, scores, group, scale="none"), centred, **EXACT)
    torch.testing.assert_close(group_advantages(rloo, scores, group), left_out, **EXACT)


# ------------------------------------------------------------------ whitening and means

NINE = torch.arange(12, 21, dtype=torch.float64).reshape(3, 3) / 10
ALL = torch.ones(3, 3, dtype=torch.bool)


def test_whitening_scales_by_the_population_deviation():
    expected = torch.tensor([[-1.5492, -1.1619, -0.7746], [-0.3873, 0.0, 0.3873], [0.7746, 1.1619, 1.5492]], dtype=torch.float64)
    torch.testing.assert_close(whiten(NINE, ALL), expected, rtol=0, atol=1e-4)


def test_whitening_can_keep_the_mean():
    expected = torch.tensor([[0.0508, 0.4381, 0.8254], [1.2127, 1.6, 1.9873], [2.3746, 2.7619, 3.1492]], dtype=torch.float64)
    result = whiten(NINE, ALL, shift_mean=False)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)
    sample_variance = torch.tensor([0.1394, 0.5046, 0.8697], dtype=torch.float64)
    assert (result[0] - sample_variance).abs().min() > 1e-2


@pytest.mark.parametrize("garbage", [99.0, math.nan, math.inf])
def test_padding_does_not_enter_the_moments(garbage):
    values = torch.tensor([[1.0, 2, 3, garbage], [4, 5, -garbage, garbage]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    # mean 3, variance 2
    expected = torch.tensor([[-1.4142136, -0.7071068, 0, 0], [0.7071068, 1.4142136, 0, 0]])
    torch.testing.assert_close(whiten(values, mask), expected, rtol=0, atol=1e-6)


def test_values_without_spread_whiten_to_exactly_zero():
    assert whiten(torch.tensor([[7.0, 0.0]]), torch.tensor([[True, False]])).tolist() == [[0.0, 0.0]]
    for width in range(1, 12):
        equal = torch.full((3, width), 0.1, dtype=torch.float64)
        assert not whiten(equal, equal > 0).any()
    tenths = torch.full((3, 7), 0.1)
    torch.testing.assert_close(whiten(tenths, tenths > 0, shift_mean=False), tenths, rtol=0, atol=1e-8)
    assert whiten(tenths, tenths < 0).tolist() == torch.zeros(3, 7).tolist()


def test_the_gradient_of_whitening_is_that_of_its_formula():
    values = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert torch.autograd.gradcheck(lambda x: whiten(x, mask), (values,))


def test_masked_mean_counts_what_counts():
    assert (
        float(masked_mean(torch.tensor([[1.0, 3.0, math.nan], [8.0, math.inf, 0.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())) == 4.0
    )
    ones = torch.ones(1, 257, dtype=torch.bfloat16)  # a sum in bfloat16 would stick at 256
    assert float(masked_mean(ones, ones > 0)) == 1.0


def test_the_mean_of_nothing_is_zero_with_a_graph():
    values = torch.full((1, 2), math.nan, requires_grad=True)
    mean = masked_mean(values, torch.zeros(1, 2, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0.0
    assert values.grad.tolist() == [[0.0, 0.0]]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, m: gae(x, x, m.float()), ShapeError, "mask must be bool, got float32; compare it with 0 first"),
        (lambda x, m: gae(x, x[:, :2], m), ShapeError, r"values must be \[B, T\] = \(2, 3\) like mask; got \(2, 2\)"),
        (lambda x, m: gae(x.long(), x, m), ShapeError, "rewards must be floating point, got int64"),
        (lambda x, m: gae(x[0], x[0], m[0]), ShapeError, "leading dimension"),
        (lambda x, m: gae(x, x, m, bootstrap=x), ShapeError, r"bootstrap must be \[B\] = \(2,\)"),
        (lambda x, m: gae(x, x, m, gamma=1.5), ConfigError, "gamma must be between 0 and 1, got 1.5"),
        (lambda x, m: gae(x, x, m, lam=-0.1), ConfigError, "lam must be between 0 and 1"),
        (lambda x, m: reinforce_plus_plus(x, m, gamma=math.nan), ConfigError, "gamma"),
        (
            lambda x, m: grpo(x[0], torch.zeros(2).long(), m),
            ShapeError,
            r"scores must be \[B\] = \(2,\), one number per row of mask; got \(3,\)",
        ),
        (lambda x, m: grpo(x[:, 0], x[:, 0], m), ShapeError, "group must be integers"),
        (lambda x, m: rloo(x[:, 0], torch.zeros(3).long(), m), ShapeError, "group must be integers"),
        (lambda x, m: grpo(x[:, 0], torch.zeros(2).long(), m, scale="stdd"), ConfigError, "did you mean 'std'"),
        (lambda x, m: grpo(x[:, 0], torch.zeros(2).long(), m, ddof=2), ConfigError, "ddof must be 1"),
        (lambda x, m: opo(x[:, 0], torch.zeros(2).long(), torch.zeros(3), m), ShapeError, "lengths must be"),
        (lambda x, m: remax(x[:, 0], x, m), ShapeError, "baselines must be"),
        (lambda x, m: whiten(x, m[:1]), ShapeError, "values must be"),
        (lambda x, m: masked_mean(x, m.int()), ShapeError, "got int32"),
    ],
)
def test_bad_input_is_named_with_what_came_and_what_to_do(call, error, words):
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(error, match=words) as caught:
        call(x, mask)
    assert isinstance(caught.value, RLHFError)
    assert isinstance(caught.value, ValueError)


def test_a_batch_of_no_rows_is_fine():
    none, mask = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)
    assert gae(none, none, mask).advantages.shape == (0, 3)
    assert grpo(torch.zeros(0), torch.zeros(0).long(), mask).advantages.shape == (0, 3)
    assert whiten(none, mask).shape == (0, 3)


# ------------------------------------------------------------------ can these tests fail?


@pytest.mark.parametrize(
    "fault",
    [
        lambda r, v, m: tuple(-x for x in gae(r, v, m, lam=0.9)),
        lambda r, v, m: gae(r, v, m.roll(1, 1), lam=0.9),
        lambda r, v, m: gae(r, v, torch.ones_like(m), lam=0.9),
        lambda r, v, m: gae(r * m, v, m, lam=0.9),
        lambda r, v, m: gae(r, v, m, lam=0.9001),
        lambda r, v, m: gae(r, v, m, lam=0.9)._replace(returns=gae(r, v, m, lam=0.9).advantages),
    ],
    ids=["sign flipped", "mask off by one", "mask ignored", "reward dropped", "lambda slightly off", "returns without value"],
)
def test_planted_faults_do_not_get_past_the_brute_force(fault):
    rewards, values, mask, _ = ragged(10)
    expected = brute_force(rewards, values, mask, 1.0, 0.9)
    got = torch.stack(tuple(fault(rewards, values, mask)))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, torch.stack(expected), **EXACT)

"""Losses equal their formulas, add up over any split, and read nothing that the mask hides."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.errors import ConfigError, ShapeError
from rlhf.ppo import ppo_clip_loss, token_weights, value_loss

EXACT = {"rtol": 0.0, "atol": 1e-10}
MODES = ["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant"]


def double(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def constant_for(mode: str) -> float | None:
    return 16.0 if mode == "constant" else None


def batch(seed: int = 0, rows: int = 8, width: int = 12, spread: float = 0.5):
    """logprobs, old_logprobs, advantages, importance weights and a mask with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)) & (
        torch.rand(rows, width, generator=generator) > 0.2
    )
    mask[3] = False
    new, old, advantages = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(3))
    old = -1 - old.abs()
    return old + spread * new, old, advantages, torch.rand(rows, width, generator=generator, dtype=torch.float64) + 0.5, mask


# ------------------------------------------------------------------ aggregation

TEN_AND_NINETY = torch.arange(90) < torch.tensor([[10], [90]])
TOKEN_LOSSES = torch.where(TEN_AND_NINETY, torch.tensor([[1.0], [3.0]], dtype=torch.float64), 0)


@pytest.mark.parametrize(
    ("mode", "constant", "loss"),
    [("token-mean", None, 2.8), ("sequence-mean", None, 2.0), ("sequence-mean-token-sum", None, 140.0), ("constant", 100, 1.4)],
)
def test_each_aggregation_gives_its_number(mode, constant, loss):
    weights = token_weights(TEN_AND_NINETY, mode, constant=constant)
    assert float((weights * TOKEN_LOSSES).sum()) == pytest.approx(loss, abs=1e-12)


def test_sequence_mean_weighs_a_token_by_its_rows_length():
    weights = token_weights(TEN_AND_NINETY, "sequence-mean")
    assert float(weights[0, 0]) == pytest.approx(0.05, abs=1e-12)
    assert float(weights[1, 89]) == pytest.approx(1 / 180, abs=1e-12)
    assert float(weights[0, 10]) == 0.0


def test_short_and_long_rows_weigh_by_tokens_or_by_rows():
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    losses = torch.where(mask, torch.tensor([[1.0], [0.0]], dtype=torch.float64), 0)
    assert float((token_weights(mask, "sequence-mean") * losses).sum()) == pytest.approx(0.5)
    assert float((token_weights(mask, "token-mean") * losses).sum()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_processes_add_up_given_the_global_counts(mode):
    *_, mask = batch(rows=9)
    whole = token_weights(mask, mode, constant=constant_for(mode))
    for sizes in ([1] * 9, [2, 3, 4], [8, 1]):
        parts = [
            token_weights(part, mode, constant=constant_for(mode), tokens=int(mask.sum()), sequences=mask.any(1).sum())
            for part in mask.split(sizes)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_weights_by_row_count_would_give_another_loss():
    parts = [token_weights(part, "token-mean") / 2 for part in TEN_AND_NINETY.split(1)]
    assert float((torch.cat(parts) * TOKEN_LOSSES).sum()) == pytest.approx(2.0)  # not 2.8


@pytest.mark.parametrize("mode", MODES)
def test_doubling_the_batch_leaves_the_loss(mode):
    losses = torch.rand(8, 12, dtype=torch.float64)
    *_, mask = batch()
    one = (token_weights(mask, mode, constant=constant_for(mode)) * losses).sum()
    two = (token_weights(mask.repeat(2, 1), mode, constant=constant_for(mode)) * losses.repeat(2, 1)).sum()
    torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("mode", MODES)
def test_empty_rows_do_not_count_and_an_empty_batch_weighs_nothing(mode):
    *_, mask = batch()
    kept = mask.any(1)
    whole = token_weights(mask, mode, constant=constant_for(mode))
    torch.testing.assert_close(whole[kept], token_weights(mask[kept], mode, constant=constant_for(mode)), rtol=0, atol=0)
    assert token_weights(torch.zeros(2, 3, dtype=torch.bool), mode, constant=constant_for(mode)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("seq-mean-token-mean", "sequence-mean"),
        ("grpo", "sequence-mean"),
        ("dapo", "token-mean"),
        ("bnpo", "token-mean"),
        ("seq-mean-token-sum", "sequence-mean-token-sum"),
        ("seq-mean-token-sum-norm", "constant"),
        ("dr_grpo", "constant"),
        ("token_mean", "token-mean"),
    ],
)
def test_a_name_from_elsewhere_is_refused_with_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"did you mean '{ours}'"):
        token_weights(TEN_AND_NINETY, theirs)


def test_a_constant_goes_with_its_mode_only():
    with pytest.raises(ConfigError, match="needs constant= above 0"):
        token_weights(TEN_AND_NINETY, "constant")
    with pytest.raises(ConfigError, match="needs constant= above 0"):
        token_weights(TEN_AND_NINETY, "constant", constant=0)
    with pytest.raises(ConfigError, match="has no meaning for aggregate='token-mean'"):
        token_weights(TEN_AND_NINETY, "token-mean", constant=100)
    with pytest.raises(ShapeError, match="mask must be bool, got int64; compare it with 0 first"):
        token_weights(TEN_AND_NINETY.long(), "token-mean")


# ------------------------------------------------------------------ the clipped surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss"),
    [
        (0.5, 1.0, 0.2, -0.5),
        (0.5, -1.0, 0.2, 0.8),
        (1.5, 1.0, (0.2, 0.28), -1.28),
        (1.5, -1.0, (0.2, 0.28), 1.5),
        (1.1, 2.0, 0.2, -2.2),
    ],
)
def test_one_token_gives_the_loss_worked_out_by_hand(ratio, advantage, clip, loss):
    output = ppo_clip_loss(double(math.log(ratio)), double(0), double(advantage), torch.tensor([[True]]), clip=clip)
    assert float(output.loss) == pytest.approx(loss, abs=1e-12)
    assert float(output.metrics["policy_loss"]) == pytest.approx(loss, abs=1e-12)


def test_the_clipped_term_is_the_one_averaged():
    ratios = double(1.5, 1.0).log()
    output = ppo_clip_loss(ratios, double(0, 0), double(1, 1), torch.tensor([[True, True]]), clip=(0.2, 0.28))
    assert float(output.loss) == pytest.approx(-1.14, abs=1e-12)
    assert float(output.metrics["clip_fraction"]) == 0.5


@pytest.mark.parametrize(("ratio", "advantage", "loss"), [(5.0, -1.0, 3.0), (2.0, -1.0, 2.0), (5.0, 1.0, -1.2)])
def test_a_dual_clip_bounds_the_push_of_a_bad_token_only(ratio, advantage, loss):
    output = ppo_clip_loss(double(math.log(ratio)), double(0), double(advantage), torch.tensor([[True]]), dual_clip=3.0)
    assert float(output.loss) == pytest.approx(loss, abs=1e-12)
    assert float(output.metrics["clip_fraction_dual"]) == float(loss == 3.0)


def test_clip_fractions_tell_the_sides_apart():
    ratio = double(0.5, 0.5, 1.5, 1.5, 1.0)
    output = ppo_clip_loss(ratio.log(), ratio * 0, double(1, -1, 1, -1, 1), torch.ones(1, 5, dtype=torch.bool))
    # A > 0 is clipped above, A < 0 below
    assert {name: round(float(value), 6) for name, value in output.metrics.items() if name.startswith("clip")} == {
        "clip_fraction": 0.4,
        "clip_fraction_low": 0.2,
        "clip_fraction_high": 0.2,
        "clip_fraction_dual": 0.0,
    }
    assert float(output.metrics["ratio_max"]) == pytest.approx(1.5)
    assert float(output.metrics["ratio_mean"]) == pytest.approx(1.0)


def test_at_the_first_step_the_ratio_is_1_nothing_is_clipped_and_kl_is_0():
    _, old, advantages, _, mask = batch()
    old = old.float()
    output = ppo_clip_loss(old.clone(), old, advantages.float(), mask)
    assert float(output.metrics["ratio_max"]) == 1.0
    assert float(output.metrics["ratio_mean"]) == 1.0
    assert float(output.metrics["clip_fraction"]) == 0.0
    assert float(output.metrics["kl_old"]) == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_at_the_first_step_the_gradient_is_that_of_reinforce(mode):
    _, old, advantages, _, mask = batch()
    weights = token_weights(mask, mode, constant=constant_for(mode))
    clipped, plain = old.clone().requires_grad_(), old.clone().requires_grad_()
    ppo_clip_loss(clipped, old, advantages, mask, weights=weights).loss.backward()
    (-(weights * advantages * plain)[mask].sum()).backward()
    torch.testing.assert_close(clipped.grad, plain.grad, **EXACT)


def test_a_loss_of_zero_at_the_first_step_still_has_a_gradient():
    x = torch.zeros(1, 2, requires_grad=True)
    output = ppo_clip_loss(x, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert x.grad.tolist() == [[-0.5, 0.5]]


def test_the_loss_is_the_formula():
    new, old, advantages, importance, mask = batch()
    weights = token_weights(mask, "sequence-mean")
    expected = 0.0
    for b, t in mask.nonzero().tolist():
        ratio, a = math.exp(new[b, t] - old[b, t]), float(advantages[b, t])
        loss = -min(a * ratio, a * min(max(ratio, 0.8), 1.3))
        if a < 0:
            loss = min(loss, -1.5 * a)
        expected += float(weights[b, t]) * float(importance[b, t]) * loss
    output = ppo_clip_loss(new, old, advantages, mask, clip=(0.2, 0.3), dual_clip=1.5, weights=weights, importance_weights=importance)
    assert float(output.loss) == pytest.approx(expected, abs=1e-10)


def test_the_importance_weight_is_apart_from_the_ratio():
    # sampled at −1.2 by the engine, −1.0 by the trainer before the update, −0.9 now
    importance = double(math.exp(-1.0 + 1.2))
    output = ppo_clip_loss(double(-0.9), double(-1.0), double(1.0), torch.tensor([[True]]), importance_weights=importance)
    assert float(output.metrics["ratio_max"]) == pytest.approx(1.1051709, abs=1e-7)
    assert float(output.loss) == pytest.approx(-1.1051709 * 1.2214028, abs=1e-6)


def test_gradients_agree_with_finite_differences():
    new, old, advantages, importance, mask = batch(rows=4, width=5)
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip_loss(x, old, advantages, mask, clip=(0.2, 0.3), dual_clip=3.0, importance_weights=importance).loss,
        (new.clone().requires_grad_(),),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [[1] * 8, [3, 5], [4, 4]])
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(mode, sizes):
    new, old, advantages, importance, mask = batch()
    whole = new.clone().requires_grad_()
    weights = token_weights(mask, mode, constant=constant_for(mode))
    total = ppo_clip_loss(whole, old, advantages, mask, weights=weights, importance_weights=importance).loss
    total.backward()
    pieces, added = new.clone().requires_grad_(), 0.0
    for rows in torch.arange(8).split(sizes):
        part = token_weights(mask[rows], mode, constant=constant_for(mode), tokens=mask.sum(), sequences=mask.any(1).sum())
        loss = ppo_clip_loss(pieces[rows], old[rows], advantages[rows], mask[rows], weights=part, importance_weights=importance[rows]).loss
        loss.backward()
        added += loss.item()
    assert added == pytest.approx(total.item(), abs=1e-10)
    torch.testing.assert_close(pieces.grad, whole.grad, **EXACT)


def test_permuted_rows_give_the_same_loss():
    new, old, advantages, _, mask = batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    one, two = (
        ppo_clip_loss(n, o, a, m).loss
        for n, o, a, m in ((new, old, advantages, mask), tuple(x[order] for x in (new, old, advantages, mask)))
    )
    torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, 200.0])
def test_garbage_off_the_mask_reaches_neither_loss_nor_gradient_nor_metrics(garbage):
    new, old, advantages, importance, mask = batch()
    clean, dirty = new.clone().requires_grad_(), torch.where(mask, new, garbage).requires_grad_()
    one = ppo_clip_loss(clean, old, advantages, mask, importance_weights=importance)
    weights = torch.where(mask, token_weights(mask, "token-mean"), garbage)
    two = ppo_clip_loss(
        dirty,
        torch.where(mask, old, -garbage),
        torch.where(mask, advantages, garbage),
        mask,
        weights=weights,
        importance_weights=torch.where(mask, importance, garbage),
    )
    one.loss.backward()
    two.loss.backward()
    torch.testing.assert_close(two.loss, one.loss, **EXACT)
    torch.testing.assert_close(dirty.grad, clean.grad, **EXACT)
    for name, value in one.metrics.items():
        torch.testing.assert_close(two.metrics[name], value, **EXACT)


def test_a_huge_masked_log_ratio_leaves_the_gradient_of_its_neighbour():
    x = torch.tensor([[0.1, 200.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    ppo_clip_loss(x, zeros, zeros - 1, torch.tensor([[True, False]])).loss.backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.1051709, 0.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gap", [25.0, 200.0, 1e5])
def test_beyond_a_log_ratio_of_20_the_loss_is_finite_and_pulls_back(gap):
    for sign, advantage in ((1.0, -1.0), (-1.0, 1.0)):  # grown though bad, shrunk though good: the sides the clip leaves open
        x = torch.tensor([[sign * gap]], requires_grad=True)
        output = ppo_clip_loss(x, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.tensor([[True]]))
        output.loss.backward()
        assert output.loss.isfinite()
        assert x.grad.isfinite().all()
        assert float(x.grad) * sign * -advantage > 0 if sign > 0 else float(x.grad) < 0
        assert all(value.isfinite() for value in output.metrics.values())


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_in_which_nothing_counts_has_loss_0_and_a_graph(shape):
    x = torch.full(shape, math.nan, requires_grad=True)
    nothing = torch.zeros(shape, dtype=torch.bool)
    for output in (
        ppo_clip_loss(x, x.detach(), x.detach(), nothing, dual_clip=2.0),
        value_loss(x, x.detach(), x.detach(), nothing, clip=0.1),
    ):
        assert output.loss.requires_grad
        output.loss.backward()
        assert output.loss.item() == 0.0
        assert not x.grad.any()
        assert all(value.item() == 0.0 for value in output.metrics.values())
        x.grad = None


def test_metrics_carry_no_graph_and_are_numbers_in_tensors():
    new, old, advantages, _, mask = batch()
    for output in (ppo_clip_loss(new.requires_grad_(), old, advantages, mask), value_loss(new, old, advantages, mask)):
        assert all(value.dim() == 0 and not value.requires_grad for value in output.metrics.values())


def test_no_gradient_goes_to_the_old_policy_or_the_advantages():
    new, old, advantages, _, mask = batch()
    old, advantages = old.requires_grad_(), advantages.requires_grad_()
    ppo_clip_loss(new.requires_grad_(), old, advantages, mask).loss.backward()
    assert old.grad is None
    assert advantages.grad is None


def test_bfloat16_log_probabilities_are_worked_on_in_float32():
    new, old, advantages, _, mask = batch()
    new, old = new.bfloat16(), old.bfloat16()
    got = ppo_clip_loss(new, old, advantages.float(), mask)
    want = ppo_clip_loss(new.float(), old.float(), advantages.float(), mask)
    assert got.loss.dtype == torch.float32
    assert torch.equal(got.loss, want.loss)


# ------------------------------------------------------------------ the value loss


@pytest.mark.parametrize(
    ("value", "target", "clip", "loss"),
    [(1.0, 1.2, 0.2, 0.125), (0.6, 1.2, 0.2, 0.18), (1.0, 0.0, 0.2, 0.5), (1.0, 1.2, None, 0.02)],
)
def test_one_value_gives_the_loss_worked_out_by_hand(value, target, clip, loss):
    output = value_loss(double(value), double(0.5), double(target), torch.tensor([[True]]), clip=clip)
    assert float(output.loss) == pytest.approx(loss, abs=1e-12)


def test_the_coefficient_is_the_half():
    output = value_loss(double(3.0), None, double(1.0), torch.tensor([[True]]), coef=1.0)
    assert float(output.loss) == 4.0
    assert float(value_loss(double(3.0), None, double(1.0), torch.tensor([[True]])).loss) == 2.0


def test_value_metrics_are_means_over_the_tokens_that_count():
    values, old, returns = double(1.0, 0.6, math.nan), double(0.5, 0.5, 0), double(1.2, 1.0, 0)
    metrics = value_loss(values, old, returns, torch.tensor([[True, True, False]]), clip=0.2).metrics
    assert float(metrics["value_mean"]) == pytest.approx(0.8)
    assert float(metrics["return_mean"]) == pytest.approx(1.1)
    assert float(metrics["error_abs"]) == pytest.approx(0.3)
    assert float(metrics["clip_fraction"]) == 0.5
    assert float(metrics["value_loss"]) == pytest.approx((0.125 + 0.08) / 2)


def test_value_gradients_agree_with_finite_differences_and_ignore_garbage():
    values, old, returns, _, mask = batch(rows=4, width=5)
    values, old, returns = (torch.where(mask, x, math.nan) for x in (values, old, returns))
    x = torch.where(mask, values, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask, clip=0.1).loss, (x,))
    dirty = values.clone().requires_grad_()
    value_loss(dirty, old, returns, mask, clip=0.1).loss.backward()
    assert dirty.grad.isfinite().all()
    assert not dirty.grad[~mask].any()


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x, m: ppo_clip_loss(x, x[:1], x, m), ShapeError, r"old_logprobs must be \[B, T\] = \(2, 3\) like mask; got \(1, 3\)"),
        (lambda x, m: ppo_clip_loss(x, x, x[:, 0], m), ShapeError, "advantages must be"),
        (lambda x, m: ppo_clip_loss(x, x, x, m.float()), ShapeError, "mask must be bool, got float32; compare it with 0 first"),
        (lambda x, m: ppo_clip_loss(x, x, x, m, weights=x[:1]), ShapeError, "weights must be"),
        (lambda x, m: ppo_clip_loss(x, x, x, m, importance_weights=x[0]), ShapeError, "importance_weights must be"),
        (lambda x, m: ppo_clip_loss(x, x, x, m, clip=-0.1), ConfigError, "clip must be at least 0"),
        (lambda x, m: ppo_clip_loss(x, x, x, m, clip=(0.2, math.nan)), ConfigError, "clip must be at least 0"),
        (lambda x, m: ppo_clip_loss(x, x, x, m, dual_clip=1.0), ConfigError, "dual_clip must be above 1, got 1.0"),
        (lambda x, m: value_loss(x, x, x.long(), m), ShapeError, "returns must be floating point, got int64"),
        (lambda x, m: value_loss(x, None, x, m, clip=0.2), ConfigError, "needs old_values"),
        (lambda x, m: value_loss(x, x, x, m, clip=-1.0), ConfigError, "clip must be at least 0, or None"),
    ],
)
def test_bad_input_is_named_with_what_came_and_what_to_do(call, error, words):
    with pytest.raises(error, match=words):
        call(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


# ------------------------------------------------------------------ can these tests fail?


@pytest.mark.parametrize(
    "fault",
    [
        lambda n, o, a, m: ppo_clip_loss(n, o, -a, m),
        lambda n, o, a, m: ppo_clip_loss(n, o, a, m.roll(1, 1)),
        lambda n, o, a, m: ppo_clip_loss(n, o, a, torch.ones_like(m)),
        lambda n, o, a, m: ppo_clip_loss(n, o, a, m, weights=m / m.numel()),
        lambda n, o, a, m: ppo_clip_loss(n, o, a, m, weights=token_weights(m, "sequence-mean")),
    ],
    ids=["sign flipped", "mask off by one", "mask ignored", "padding in the denominator", "another aggregation"],
)
def test_planted_faults_change_the_gradient_at_the_first_step(fault):
    _, old, advantages, _, mask = batch()
    x = old.clone().requires_grad_()
    fault(x, old, advantages, mask).loss.backward()
    reinforce = -advantages * token_weights(mask, "token-mean")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.zeros_like(x) if x.grad is None else x.grad, reinforce, **EXACT)

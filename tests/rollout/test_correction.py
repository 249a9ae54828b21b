"""Importance correction: how much likelier the policy finds a token than the sampler did, cut off from above."""

from __future__ import annotations

import math

import pytest
import torch

import rlhf
from rlhf import ImportanceCorrection, Rollout

TIGHT = {"atol": 1e-6, "rtol": 0.0}  # float32 numbers near 1


def _rollout(logprobs: list[list[float]], **options: object) -> Rollout:
    return Rollout.build([[1, 2]] * len(logprobs), [[3] * len(row) for row in logprobs], logprobs=logprobs, **options)  # type: ignore[arg-type]


# two rows, the second one token shorter; differences (0.5, 1.0, −1.0) and (0.2, −0.6)
ROLLOUT = _rollout([[-2.0, -2.0, -2.0], [-1.0, -1.0]])
OLD = torch.tensor([[-1.5, -1.0, -3.0], [-0.8, -1.6, 9.9]])  # 9.9 stands in the padding


@pytest.mark.parametrize(("difference", "weight"), [(0.5, 1.6487213), (1.0, 2.0), (-1.0, 0.3678794), (0.0, 1.0), (30.0, 2.0)])
def test_a_token_weighs_the_exponential_of_the_difference_cut_from_above_only(difference: float, weight: float) -> None:
    weights, kept = ImportanceCorrection(cap=2.0).weights(torch.tensor([[-3.0 + difference]]), _rollout([[-3.0]]))
    torch.testing.assert_close(weights, torch.tensor([[weight]]), **TIGHT)
    assert kept.tolist() == [[True]]


def test_the_correction_compares_old_with_sampler_and_the_ratio_new_with_old() -> None:
    rollout, old, new = _rollout([[-1.2]]), torch.tensor([[-1.0]]), torch.tensor([[-0.9]], requires_grad=True)
    weights, _ = ImportanceCorrection().weights(old, rollout)
    torch.testing.assert_close(weights, torch.tensor([[1.2214028]]), **TIGHT)
    mask = torch.tensor([[True]])
    plain = rlhf.ppo_clip_loss(new, old, torch.ones(1, 1), mask)
    torch.testing.assert_close(plain.loss, torch.tensor(-1.1051709), **TIGHT)
    # 1.2214028 × 1.1051709 = exp(0.2 + 0.1)
    corrected = rlhf.ppo_clip_loss(new, old, torch.ones(1, 1), mask, importance_weights=weights)
    torch.testing.assert_close(corrected.loss, torch.tensor(-1.3498588), **TIGHT)


def test_a_sequence_weighs_the_product_of_its_tokens() -> None:
    weights, _ = ImportanceCorrection("sequence", cap=2.0).weights(OLD, ROLLOUT)
    # exp(0.5) = 1.6487213, exp(−0.4) = 0.6703200; padding weighs 1
    torch.testing.assert_close(weights, torch.tensor([[1.6487213] * 3, [0.67032, 0.67032, 1.0]]), **TIGHT)


def test_a_geometric_mean_does_not_know_the_length() -> None:
    weights, _ = ImportanceCorrection("geometric").weights(OLD, ROLLOUT)
    # exp(0.5 / 3) = 1.1813604, exp(−0.4 / 2) = 0.8187308
    torch.testing.assert_close(weights, torch.tensor([[1.1813604] * 3, [0.8187308, 0.8187308, 1.0]]), **TIGHT)


def test_tool_output_neither_weighs_nor_counts() -> None:
    rollout = _rollout([[-2.0, 0.0, -2.0]], response_masks=[[True, False, True]])
    old = torch.tensor([[-1.5, math.nan, -2.2]])
    token, _ = ImportanceCorrection().weights(old, rollout)
    torch.testing.assert_close(token, torch.tensor([[1.6487213, 1.0, 0.8187308]]), **TIGHT)
    mean, kept = ImportanceCorrection("geometric", reject=(0.5, 2.0)).weights(old, rollout)
    torch.testing.assert_close(mean, torch.tensor([[1.1618342, 1.0, 1.1618342]]), **TIGHT)  # exp(0.3 / 2)
    assert kept.all()


def test_without_a_cap_a_weight_is_what_it_is() -> None:
    weights, _ = ImportanceCorrection(cap=math.inf).weights(torch.tensor([[-1.0]]), _rollout([[-4.0]]))
    torch.testing.assert_close(weights, torch.tensor([[20.0855369]]), atol=1e-5, rtol=0.0)


def test_rejection_looks_at_the_uncut_weight_token_by_token_or_row_by_row() -> None:
    _, tokens = ImportanceCorrection("token", reject=(0.5, 2.5)).weights(OLD, ROLLOUT)
    assert tokens.tolist() == [[True, False, False], [True, True, True]]  # exp(1) = 2.72 is out though the cap is 2
    _, rows = ImportanceCorrection("sequence", reject=(0.9, 2.0)).weights(OLD, ROLLOUT)
    assert rows.tolist() == [[True, True, True], [False, False, True]]
    _, means = ImportanceCorrection("geometric", reject=(0.0, 1.0)).weights(OLD, ROLLOUT)
    assert means.tolist() == [[False, False, False], [True, True, True]]


def test_weights_carry_no_gradient_and_stay_finite_for_a_token_the_sampler_thought_impossible() -> None:
    old = torch.tensor([[-1.0, -200.0]], requires_grad=True)
    weights, _ = ImportanceCorrection().weights(old, _rollout([[-200.0, -1.0]]))
    assert not weights.requires_grad
    assert weights.tolist() == [[2.0, 0.0]]  # exp(−199) is 0 in float32


def test_padding_and_the_order_of_the_rows_change_nothing() -> None:
    for level in ("token", "sequence", "geometric"):
        correction = ImportanceCorrection(level, reject=(0.5, 2.0))  # type: ignore[arg-type]
        weights, kept = correction.weights(OLD, ROLLOUT)
        turned_weights, turned_kept = correction.weights(OLD[[1, 0]], ROLLOUT.select([1, 0]))
        assert torch.equal(turned_weights[[1, 0]], weights)
        assert torch.equal(turned_kept[[1, 0]], kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "batch"}, "'token', 'sequence', 'geometric'|token, sequence, geometric"),
        ({"cap": 0.0}, "cap must be above 0, got 0.0"),
        ({"cap": math.nan}, "cap must be above 0, got nan"),
        ({"reject": (2.0, 0.5)}, r"0 <= low < high, got \(2.0, 0.5\)"),
        ({"reject": (-1.0, 0.5)}, r"0 <= low < high, got \(-1.0, 0.5\)"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(rlhf.ConfigError, match=message):
        ImportanceCorrection(**options)  # type: ignore[arg-type]


def test_a_rollout_without_log_probabilities_or_of_another_shape_is_refused() -> None:
    with pytest.raises(rlhf.RolloutError, match="leave correction= out"):
        ImportanceCorrection().weights(torch.zeros(1, 1), Rollout.build([[1]], [[2]]))
    with pytest.raises(rlhf.ShapeError, match=r"must be \[2, 3\] like the rollout, got \[2, 1\]"):
        ImportanceCorrection().weights(torch.zeros(2, 1), ROLLOUT)

"""KL estimates are what their formulas say, stay finite, and pull back; coefficients move as documented."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.errors import ConfigError, ShapeError
from rlhf.ppo import AdaptiveKL, FixedKL, KLPenalty, kl_estimate, kl_mean

TIGHT = {"rtol": 0.0, "atol": 1e-12}


def double(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_the_estimators_on_two_outcomes_give_the_published_numbers():
    sampled, reference = double(0.5, 0.5).log(), double(0.25, 0.75).log()
    for name, values, mean in (
        ("k1", (0.6931472, -0.4054651), 0.143841),
        ("k2", (0.2402265, 0.0822010), 0.1612137),
        ("k3", (0.1931472, 0.0945349), 0.143841),
        ("abs", (0.6931472, 0.4054651), 0.5493061),
    ):
        estimate = kl_estimate(sampled, reference, name)
        torch.testing.assert_close(estimate, double(*values), rtol=0, atol=1e-6)
        assert float(estimate.mean()) == pytest.approx(mean, abs=1e-6)


def test_k3_has_its_ratio_the_right_way_up():
    assert float(kl_estimate(double(-1), double(-2), "k3")) == pytest.approx(0.3678794, abs=1e-7)


def test_equal_policies_have_no_kl():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for name in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
        assert not kl_estimate(x, x.clone(), name).any()


def expected_gradients(estimator: str) -> torch.Tensor:
    """E over a uniform policy on three tokens of the gradient of the estimate with respect to the logits."""
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logprobs = theta.log_softmax(0)[None]
    reference = double(0.7, 0.2, 0.1).log()
    chance = logprobs.detach().exp()
    return torch.autograd.grad((chance * kl_estimate(logprobs, reference, estimator)).sum(), theta)[0]


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        ("k1", (0.0, 0.0, 0.0)),
        ("k2", (-0.3554081, 0.0621795, 0.2932286)),
        ("k3", (-0.3666667, 0.1333333, 0.2333333)),
        ("k1+", (-0.3554081, 0.0621795, 0.2932286)),
        ("k3+", (-0.3554081, 0.0621795, 0.2932286)),
    ],
)
def test_each_estimator_as_a_loss_has_the_documented_gradient(estimator, gradient):
    torch.testing.assert_close(expected_gradients(estimator), torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-6)


def test_k2s_gradient_is_that_of_the_reverse_kl_and_k3s_that_of_the_forward_kl():
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    policy, reference = theta.log_softmax(0), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    reverse = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), theta, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), theta)[0]
    torch.testing.assert_close(expected_gradients("k2"), reverse, **TIGHT)
    torch.testing.assert_close(expected_gradients("k3"), forward, **TIGHT)
    assert (expected_gradients("k3") - reverse).abs().max() > 0.05


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl():
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    policy, reference = theta.log_softmax(0), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    penalty = KLPenalty(1.0)(policy.detach()[None], reference[None], torch.ones(1, 3, dtype=torch.bool))[0]
    ascent = torch.autograd.grad((policy.detach().exp() * penalty * policy).sum(), theta)[0]
    torch.testing.assert_close(-ascent, torch.tensor([-0.3554081, 0.0621795, 0.2932286], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_gradients_agree_with_finite_differences(name):
    logprobs = double(-0.1, -2.5, -7.0, -30.0, -1.0).requires_grad_()
    reference = double(-0.3, -2.0, -8.0, -1.0, -30.0)  # the last two lie beyond the linear bound
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, name), (logprobs,))


@pytest.mark.parametrize("gap", [20.0, 25.0, 200.0, 1e6])
def test_k3_is_finite_and_still_pulls_back_where_the_policy_has_left_the_reference(gap):
    logprobs = torch.tensor([[-gap]], requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1, 1), "k3")
    kl.sum().backward()
    assert kl.isfinite().all()
    assert kl.item() > 1e8
    assert logprobs.grad.item() < -1e8  # descent raises the log-probability


def test_k3_keeps_the_digits_of_a_small_difference():
    # exp(−d) − 1 + d in float32 would return 0 or 1e-7; with expm1 the sum loses half an ulp of 1e-3, 2e-4 of the result
    assert float(kl_estimate(torch.tensor([[1e-3]]), torch.zeros(1, 1), "k3")) == pytest.approx(4.99833e-7, rel=5e-4)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_off_the_mask_reaches_neither_value_nor_gradient(name, garbage):
    logprobs = double(-1.0, garbage, -2.0).requires_grad_()
    kl = kl_estimate(logprobs, double(-1.5, 3.0, -1.0), name, mask=torch.tensor([[True, False, True]]))
    kl.sum().backward()
    assert kl[0, 1] == 0
    assert logprobs.grad[0, 1] == 0
    assert logprobs.grad.isfinite().all()
    assert kl.isfinite().all()


def test_the_mean_goes_over_tokens_then_over_rows_that_have_any():
    kl = torch.full((8, 3), 0.4)
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[2], mask[5], kl[2] = False, False, math.nan
    mask[0, 1:] = False
    kl[0, 1:] = 100.0
    assert float(kl_mean(kl, mask)) == pytest.approx(0.4, abs=1e-7)
    assert float(kl_mean(kl, torch.zeros_like(mask))) == 0.0


# ------------------------------------------------------------------ controllers and the penalty


def test_the_adaptive_coefficient_follows_its_formula():
    controller = AdaptiveKL(0.001, target=0.1, horizon=10_000)
    updates = [(0.05, 1024), (0.2, 1024), (0.1, 1024), (10.0, 1024), (-1.0, 1024), (0.0, 512), (0.11, 256)]
    expected = [
        0.00097952,
        0.0009995805696,
        0.0009995805696,
        0.0010200519796654,
        0.0009991613151219,
        0.0009889299032550,
        0.0009914615638073,
    ]
    for (kl, rows), coef in zip(updates, expected, strict=True):
        controller.update(kl, rows)
        assert controller.coef == pytest.approx(coef, rel=1e-12)


def test_the_adaptive_coefficient_rises_above_the_target_and_falls_below_it():
    controller = AdaptiveKL(0.1, target=0.02, horizon=1000)
    controller.update(0.03, 100)
    assert controller.coef == pytest.approx(0.102)
    controller.update(0.02, 100)
    assert controller.coef == pytest.approx(0.102)
    controller.update(torch.tensor(0.01), 100)
    assert controller.coef == pytest.approx(0.102 * 0.98)


def test_the_adaptive_coefficient_never_falls_to_zero_or_below_however_many_rows():
    controller = AdaptiveKL(0.001, target=0.1, horizon=1000)
    for _ in range(20):
        controller.update(0.0, 6000)
        assert controller.coef > 0
    low = controller.coef
    controller.update(0.5, 1000)
    assert controller.coef > low


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_no_number_leaves_the_coefficient_alone(kl):
    controller = AdaptiveKL(0.1, target=0.02, horizon=1000)
    controller.update(kl, 100)
    assert controller.coef == 0.1


def test_a_fixed_coefficient_stays():
    controller = FixedKL(0.3)
    controller.update(100.0, 10_000)
    assert controller.coef == 0.3


@pytest.mark.parametrize("make", [lambda: AdaptiveKL(0.1, target=0.02, horizon=1000), lambda: FixedKL(0.1)])
def test_a_controllers_state_survives_a_round_trip(make):
    used = KLPenalty(make())
    used.update(0.1, 100)
    fresh = KLPenalty(make())
    fresh.load_state_dict(used.state_dict())
    for penalty in (used, fresh):
        penalty.update(0.05, 300)
    assert fresh.coef == used.coef


def test_the_penalty_is_minus_the_coefficient_times_the_kl():
    penalty = KLPenalty(0.05)
    mask = torch.tensor([[True, True, True, False]])
    rewards = penalty(double(0.1, -0.2, 0.3, math.nan), double(0, 0, 0, 0), mask)
    torch.testing.assert_close(rewards, double(-0.005, 0.01, -0.015, 0), **TIGHT)
    assert float(KLPenalty(0.1)(double(-1), double(-2), mask[:, :1])) == pytest.approx(-0.1)


def test_the_penalty_reads_the_present_coefficient():
    controller = AdaptiveKL(0.1, target=0.02, horizon=1000)
    penalty = KLPenalty(controller, estimator="k3")
    penalty.update(1.0, 1000)
    assert penalty.coef == controller.coef == pytest.approx(0.12)
    assert repr(penalty) == f"KLPenalty(AdaptiveKL(coef={controller.coef}, target=0.02, horizon=1000.0), estimator='k3')"


def test_a_controller_of_ones_own_will_do():
    class Falling:
        coef = 1.0

        def update(self, kl, rows):
            self.coef /= 2

        def state_dict(self):
            return {"coef": self.coef}

        def load_state_dict(self, state):
            self.coef = state["coef"]

    penalty = KLPenalty(Falling())
    penalty.update(0.0, 1)
    assert penalty.coef == 0.5


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: kl_estimate(torch.zeros(1, 2), torch.zeros(1, 3)),
            ShapeError,
            r"ref_logprobs must be \(1, 2\) like logprobs; got \(1, 3\)",
        ),
        (lambda: kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), mask=torch.ones(1, 2)), ShapeError, "mask must be bool"),
        (lambda: kl_mean(torch.zeros(1, 2), torch.ones(1, 3).bool()), ShapeError, "mask must be"),
        (lambda: kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "low_var_kl"), ConfigError, "did you mean 'k3'"),
        (lambda: KLPenalty(0.1, "mse"), ConfigError, "did you mean 'k2'"),
        (lambda: KLPenalty(-0.1), ConfigError, "coef must be a finite number of at least 0; got -0.1"),
        (lambda: KLPenalty("0.1"), ConfigError, "FixedKL and AdaptiveKL"),
        (lambda: AdaptiveKL(0.0, 0.1, 100), ConfigError, "coef must be a finite number above 0"),
        (lambda: AdaptiveKL(0.1, 0.0, 100), ConfigError, "target"),
        (lambda: AdaptiveKL(0.1, 0.1, -1), ConfigError, "horizon"),
        (lambda: FixedKL(math.nan), ConfigError, "coef"),
    ],
)
def test_bad_options_say_what_to_do(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("fault", [lambda p, r: kl_estimate(r, p, "k3"), lambda p, r: -kl_estimate(p, r, "k3")], ids=["swapped", "sign"])
def test_planted_faults_are_seen(fault):
    with pytest.raises(AssertionError):
        torch.testing.assert_close(fault(double(-1.0), double(-2.0)), double(0.36787944), rtol=0, atol=1e-6)

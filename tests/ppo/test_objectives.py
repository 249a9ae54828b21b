"""The loss objects hand the right parts to the right functions and refuse what would silently do nothing."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from rlhf.errors import ConfigError
from rlhf.ppo import LossOutput, PolicyLoss, ValueLoss, kl_estimate, ppo_clip_loss, token_weights, value_loss

EXACT = {"rtol": 0.0, "atol": 1e-10}


class Policy(NamedTuple):
    logprobs: torch.Tensor
    entropy: torch.Tensor | None


class Value(NamedTuple):
    values: torch.Tensor


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    new, old, ref, advantages, entropy, values, returns = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(7))
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [2], [4]])
    fields = {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages, "values": values, "returns": returns}
    dirty = {name: torch.where(mask, value, float("nan")) for name, value in fields.items()}
    batch = SimpleNamespace(**dirty, importance_weights=None)
    return SimpleNamespace(
        new=torch.where(mask, new, float("nan")), entropy=torch.where(mask, entropy, float("nan")), mask=mask, batch=batch
    )


def test_the_policy_loss_is_surrogate_minus_entropy_plus_kl(parts):
    loss = PolicyLoss(clip=(0.1, 0.3), dual_clip=2.0, aggregate="sequence-mean", entropy_coef=0.1, kl_coef=0.5)
    weights = loss.weights(parts.mask)
    x, h = parts.new.clone().requires_grad_(), parts.entropy.clone().requires_grad_()
    output = loss(Policy(x, h), parts.batch, weights)
    surrogate = ppo_clip_loss(
        parts.new, parts.batch.old_logprobs, parts.batch.advantages, parts.mask, clip=(0.1, 0.3), dual_clip=2.0, weights=weights
    )
    kl = kl_estimate(parts.new, parts.batch.ref_logprobs, "k3", mask=parts.mask)
    entropy = torch.where(parts.mask, parts.entropy, 0)
    torch.testing.assert_close(output.loss.detach(), surrogate.loss - 0.1 * (weights * entropy).sum() + 0.5 * (weights * kl).sum(), **EXACT)
    for name, value in surrogate.metrics.items():
        torch.testing.assert_close(output.metrics[name], value, **EXACT)
    assert float(output.metrics["entropy"]) == pytest.approx(float(entropy.sum() / parts.mask.sum()), abs=1e-10)
    assert float(output.metrics["kl_reference"]) == pytest.approx(float(kl.sum() / parts.mask.sum()), abs=1e-10)
    output.loss.backward()
    torch.testing.assert_close(h.grad, -0.1 * weights, **EXACT)
    assert x.grad.isfinite().all()
    assert not x.grad[~parts.mask].any()


def test_the_defaults_are_plain_ppo(parts):
    loss = PolicyLoss()
    output = loss(Policy(parts.new, parts.entropy), parts.batch, loss.weights(parts.mask))
    torch.testing.assert_close(
        output.loss, ppo_clip_loss(parts.new, parts.batch.old_logprobs, parts.batch.advantages, parts.mask).loss, **EXACT
    )
    assert loss.needs == frozenset()
    assert "kl_reference" not in output.metrics


def test_entropy_is_asked_for_only_where_its_gradient_is_needed():
    assert PolicyLoss(entropy_coef=0.01).needs == frozenset({"entropy"})
    assert PolicyLoss(entropy_coef=0.0).needs == frozenset()


def test_importance_weights_of_the_experience_act(parts):
    loss = PolicyLoss()
    weights = loss.weights(parts.mask)
    plain = loss(Policy(parts.new, None), parts.batch, weights).loss
    parts.batch.importance_weights = torch.full_like(parts.new, 2.0)
    torch.testing.assert_close(loss(Policy(parts.new, None), parts.batch, weights).loss, 2 * plain, **EXACT)


@pytest.mark.parametrize(
    "loss", [PolicyLoss(entropy_coef=0.1, kl_coef=0.2, aggregate="sequence-mean"), PolicyLoss(aggregate="constant", constant=5)]
)
def test_micro_batches_add_up_to_the_mini_batch(parts, loss):
    whole = parts.new.clone().requires_grad_()
    loss(Policy(whole, parts.entropy), parts.batch, loss.weights(parts.mask)).loss.backward()
    pieces = parts.new.clone().requires_grad_()
    for rows in torch.arange(6).split([1, 2, 3]):
        part = SimpleNamespace(**{name: None if value is None else value[rows] for name, value in vars(parts.batch).items()})
        weights = loss.weights(parts.mask[rows], tokens=parts.mask.sum(), sequences=parts.mask.any(1).sum())
        loss(Policy(pieces[rows], parts.entropy[rows]), part, weights).loss.backward()
    torch.testing.assert_close(pieces.grad, whole.grad, **EXACT)


def test_a_group_without_advantage_still_moves_through_the_kl(parts):
    parts.batch.advantages = torch.zeros_like(parts.new)
    for coef in (0.0, 0.04):
        x = parts.new.clone().requires_grad_()
        loss = PolicyLoss(kl_coef=coef)
        loss(Policy(x, None), parts.batch, loss.weights(parts.mask)).loss.backward()
        assert bool(x.grad.any()) == (coef > 0)


def test_a_kind_of_ones_own_gets_the_parts(parts):
    def vanilla(logprobs, old_logprobs, advantages, mask, *, clip, weights, importance_weights):
        assert clip == 0.2
        assert importance_weights is None
        value = -(torch.where(mask, logprobs * advantages, 0) * weights).sum()
        return LossOutput(value, {"mine": value.detach()})

    loss = PolicyLoss(kind=vanilla, aggregate="sequence-mean-token-sum")
    output = loss(Policy(parts.new, None), parts.batch, loss.weights(parts.mask))
    expected = -torch.where(parts.mask, parts.new * parts.batch.advantages, 0).sum() / 5
    torch.testing.assert_close(output.loss, expected, **EXACT)
    assert set(output.metrics) == {"mine"}


def test_a_batch_in_which_nothing_counts_is_zero_with_a_graph(parts):
    x, h = parts.new.clone().requires_grad_(), parts.entropy.clone().requires_grad_()
    output = PolicyLoss(entropy_coef=0.1, kl_coef=0.1)(Policy(x, h), parts.batch, torch.zeros(6, 5))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not x.grad.any()
    assert not h.grad.any()


def test_the_value_loss_reads_values_and_returns(parts):
    loss = ValueLoss(clip=0.2, coef=0.3, aggregate="sequence-mean")
    weights = loss.weights(parts.mask)
    output = loss(Value(parts.new), parts.batch, weights)
    expected = value_loss(parts.new, parts.batch.values, parts.batch.returns, parts.mask, clip=0.2, coef=0.3, weights=weights)
    torch.testing.assert_close(output.loss, expected.loss, **EXACT)
    assert output.metrics.keys() == expected.metrics.keys()


def test_the_value_loss_needs_old_values_only_to_clip(parts):
    parts.batch.values = None
    weights = token_weights(parts.mask, "token-mean")
    assert ValueLoss()(Value(parts.new), parts.batch, weights).loss > 0
    with pytest.raises(ConfigError, match="pass critic= to make_experience"):
        ValueLoss(clip=0.2)(Value(parts.new), parts.batch, weights)


def test_k1_in_the_loss_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"expected gradient of 0.*KLPenalty"):
        PolicyLoss(kl_coef=0.1, kl_estimator="k1")


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("ref_logprobs", r"pass reference=actor.reference\(\) to make_experience, or set kl_coef=0"),
        ("advantages", r"call experience.with_advantages\(estimator\)"),
        ("old_logprobs", "make_experience"),
    ],
)
def test_what_the_experience_lacks_is_named_with_advice(parts, missing, advice):
    setattr(parts.batch, missing, None)
    loss = PolicyLoss(kl_coef=0.1)
    with pytest.raises(ConfigError, match=f"needs {missing}.*{advice}"):
        loss(Policy(parts.new, None), parts.batch, loss.weights(parts.mask))
    if missing == "ref_logprobs":
        PolicyLoss()(Policy(parts.new, None), parts.batch, loss.weights(parts.mask))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": -0.2}, "clip"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"aggregate": "dapo"}, "did you mean 'token-mean'"),
        ({"aggregate": "constant"}, "constant"),
        ({"constant": 5.0}, "no meaning"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0"),
        ({"kl_estimator": "low_var_kl"}, "did you mean 'k3'"),
        ({"kind": "ppo"}, "kind must be a function"),
        ({"clip": "0.2"}, "clip must be at least 0, or a pair"),
        ({"clip": (0.2, 0.3, 0.4)}, "clip must be at least 0, or a pair"),
        ({"clip": None}, "clip must be at least 0, or a pair"),
        ({"dual_clip": "3"}, "dual_clip must be above 1"),
        ({"kl_coef": float("inf")}, "kl_coef must be at least 0 and finite"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be a finite number, got nan"),
        ({"entropy_coef": "0.01"}, "entropy_coef must be a finite number, got '0.01'"),
    ],
)
def test_bad_options_raise_when_the_loss_is_made(options, words):
    with pytest.raises(ConfigError, match=words):
        PolicyLoss(**options)


@pytest.mark.parametrize("options", [{"clip": -1}, {"clip": "1"}, {"coef": 0}, {"coef": "1"}, {"aggregate": "mean"}, {"constant": 2}])
def test_bad_options_of_the_value_loss_raise_when_it_is_made(options):
    with pytest.raises(ConfigError):
        ValueLoss(**options)


@pytest.mark.parametrize("loss", [PolicyLoss(clip=(0.2, 0.28), kl_coef=0.1), ValueLoss(clip=0.2)])
def test_a_loss_compares_by_its_options_and_can_be_pickled(loss):
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert hash(loss) == hash(pickle.loads(pickle.dumps(loss)))

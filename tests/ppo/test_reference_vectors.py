"""The numbers of another implementation, but where its README names a trap: there, ours must be right and not equal."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf.ppo import gae, grpo, kl_estimate, opo, ppo_clip_loss, reinforce_plus_plus, rloo, token_weights, value_loss, whiten

CASES = [f"{n:02d}" for n in range(20)]
# Float64 on both sides; theirs adds 1e-8 to denominators (token counts, group deviations), which leaves about as much.
EXACT, THEIR_EPS = {"rtol": 0.0, "atol": 1e-10}, {"rtol": 5e-8, "atol": 1e-9}
# Their gradients are stored in float32.
SINGLE = {"rtol": 1e-6, "atol": 1e-6}
AGGREGATIONS = [("token-mean", "token-mean"), ("seq-mean-token-mean", "sequence-mean"), ("seq-mean-token-sum", "sequence-mean-token-sum")]


@pytest.fixture(scope="module")
def vectors(shared):
    path = shared / "vectors" / "load_vectors.py"
    spec = importlib.util.spec_from_file_location("load_vectors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Its reader unpacks a buffer for every name; one that unpacks each buffer once takes 0.05 s instead of 6.
    module.np = SimpleNamespace(load=lambda archive: dict(np.load(archive)), prod=np.prod)
    return module.load()


@pytest.fixture
def get(vectors, request):
    """get(name) reads "<topic>/<case>/<name>" of the test's topic and case."""
    topic, case = request.param
    return lambda name: torch.as_tensor(vectors[f"{topic}/{case}/{name}"].copy())


def of(topic, cases=CASES):
    return pytest.mark.parametrize("get", [(topic, case) for case in cases], indirect=True, ids=cases)


# ------------------------------------------------------------------ advantages


@of("adv")
def test_gae(get):
    mask = get("in/mask").bool()
    gamma, lam = get("in/gamma_lam").tolist()
    result = gae(get("in/r_dense"), get("in/values"), mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(result.advantages, torch.where(mask, get("out/gae_raw/adv"), 0), **EXACT)
    torch.testing.assert_close(result.returns, torch.where(mask, get("out/gae/ret"), 0), **EXACT)


@of("adv")
def test_whitening_and_gae_whitened(get):
    mask = get("in/mask").bool()
    n = int(mask.sum())
    to_population = math.sqrt(n / (n - 1))  # theirs divides by the sample deviation
    theirs, raw = torch.where(mask, get("out/gae/adv"), 0), get("out/gae_raw/adv")
    # the 1e-8 stands inside another square root: relative difference below 1e-8 / variance
    torch.testing.assert_close(whiten(raw, mask), theirs * to_population, rtol=1e-6, atol=1e-9)
    gamma, lam = get("in/gamma_lam").tolist()
    ours = gae(get("in/r_dense"), get("in/values"), mask, gamma=gamma, lam=lam).advantages
    torch.testing.assert_close(whiten(ours, mask), theirs * to_population, rtol=1e-6, atol=1e-9)


def without_singletons(get, name):
    """Their advantages with groups of one set to the right value, 0."""
    group, mask = get("in/gid"), get("in/mask").bool()
    alone = (group[:, None] == group[None, :]).sum(1) == 1
    return torch.where(mask & ~alone[:, None], get(f"out/{name}/adv"), 0)


@of("adv")
def test_group_estimators(get):
    mask, group, scores = get("in/mask").bool(), get("in/gid"), get("in/r").sum(1)
    for name, result in (
        ("grpo", grpo(scores, group, mask)),
        ("dr_grpo", grpo(scores, group, mask, scale="none")),
        ("rloo", rloo(scores, group, mask)),
        ("rloo_vectorized", rloo(scores, group, mask)),
        ("opo", opo(scores, group, mask.sum(1), mask)),
    ):
        expected = without_singletons(get, name)
        torch.testing.assert_close(result.advantages, expected, msg=lambda text, name=name: f"{name}: {text}", **EXACT)
        torch.testing.assert_close(result.returns, expected, **EXACT)


@of("adv", [case for case in CASES if int(case) % 4 != 1 or int(case) < 4])  # in the others their holes cut credit
def test_reinforce_plus_plus(get):
    mask = get("in/mask").bool()
    gamma, _ = get("in/gamma_lam").tolist()
    result = reinforce_plus_plus(get("in/r_dense"), mask, gamma=gamma)
    torch.testing.assert_close(result.returns, torch.where(mask, get("out/reinforce_pp/ret"), 0), **EXACT)
    n = int(mask.sum())
    theirs = torch.where(mask, get("out/reinforce_pp/adv"), 0)
    torch.testing.assert_close(whiten(result.advantages, mask) * math.sqrt((n - 1) / n), theirs, rtol=1e-6, atol=1e-9)


@of("adv", ["05", "09", "13", "17"])
def test_a_hole_costs_nothing_in_reinforce_plus_plus(get):
    mask, rewards = get("in/mask").bool(), get("in/r_dense")
    gamma, _ = get("in/gamma_lam").tolist()
    result = reinforce_plus_plus(rewards, mask, gamma=gamma)
    expected = torch.zeros_like(rewards)
    for b in range(len(mask)):
        last = 0.0
        for t in mask[b].nonzero().squeeze(1).flip(0).tolist():
            expected[b, t] = last = float(rewards[b, t]) + gamma * last
    torch.testing.assert_close(result.returns, expected, **EXACT)


@of("adv", ["07"])
def test_a_group_of_equal_scores_is_exactly_zero_in_float32(get):
    mask = get("in/mask").bool()
    assert not grpo(get("in/r").sum(1).float(), get("in/gid"), mask).advantages.any()


@of("adv")
def test_a_planted_sign_flip_is_seen(get):
    mask, group, scores = get("in/mask").bool(), get("in/gid"), get("in/r").sum(1)
    expected = without_singletons(get, "dr_grpo")
    if not expected.any():
        return  # groups of one or without spread: 0 has no sign
    with pytest.raises(AssertionError):
        torch.testing.assert_close(grpo(-scores, group, mask, scale="none").advantages, expected, **EXACT)


# ------------------------------------------------------------------ losses


def policy_loss(get, mode, *, constant=None, weighted=False):
    low, high, dual = get("in/clip").tolist()
    mask, x = get("in/mask").bool(), get("in/new").requires_grad_()
    output = ppo_clip_loss(
        x,
        get("in/old"),
        get("in/adv"),
        mask,
        clip=(low, high),
        dual_clip=dual,
        weights=token_weights(mask, mode, constant=constant),
        importance_weights=get("in/is_w") if weighted else None,
    )
    output.loss.backward()
    return output, x.grad


@of("pg", [case for case in CASES if int(case) % 5 != 4])  # the others clamp the log-ratio at ±20
def test_the_clipped_policy_loss(get):
    for theirs, ours in AGGREGATIONS:
        output, gradient = policy_loss(get, ours)
        torch.testing.assert_close(output.loss.detach(), get(f"out/vanilla/{theirs}/loss"), **THEIR_EPS)
        torch.testing.assert_close(gradient, get(f"out/vanilla/{theirs}/grad").double(), **SINGLE)
    for name, key in (("clip_fraction", "pg_clipfrac"), ("clip_fraction_dual", "pg_clipfrac_lower")):
        assert float(output.metrics[name]) == pytest.approx(float(get(f"out/vanilla/token-mean/actor/{key}")), abs=1e-6)
    output, gradient = policy_loss(get, "token-mean", weighted=True)
    torch.testing.assert_close(output.loss.detach(), get("out/vanilla/token-mean/w/loss"), **THEIR_EPS)
    torch.testing.assert_close(gradient, get("out/vanilla/token-mean/w/grad").double(), **SINGLE)


@of("pg", [case for case in CASES if int(case) % 5 != 4])
def test_the_constant_aggregation_is_a_mean_over_rows(get):
    mask = get("in/mask").bool()
    output, _ = policy_loss(get, "constant", constant=mask.shape[1])
    rows = int(mask.any(1).sum())  # theirs is a sum over rows
    torch.testing.assert_close(output.loss.detach() * rows, get("out/vanilla/seq-mean-token-sum-norm/loss"), **THEIR_EPS)


@of("pg", ["04", "09", "14", "19"])
def test_where_theirs_clamps_ours_is_finite(get):
    output, gradient = policy_loss(get, "token-mean")
    assert output.loss.isfinite()
    assert gradient.isfinite().all()


@of("agg")
def test_the_aggregations(get):
    mask, losses = get("in/mask").bool(), get("in/mat")
    rows, width = int(mask.any(1).sum()), mask.shape[1]

    def total(mode, **counts):
        return torch.where(mask, token_weights(mask, mode, **counts) * losses, 0).sum()

    for theirs, ours in AGGREGATIONS:
        torch.testing.assert_close(total(ours), get(f"out/{theirs}"), **THEIR_EPS)
        # theirs multiplies by the two ranks, whose gradients it averages; ours are summed
        torch.testing.assert_close(2 * total(ours, tokens=37, sequences=11), get(f"out/{theirs}/global"), **THEIR_EPS)
    torch.testing.assert_close(total("constant", constant=width) * rows, get("out/seq-mean-token-sum-norm"), **THEIR_EPS)
    torch.testing.assert_close(total("constant", constant=16, sequences=11) * 11, get("out/seq-mean-token-sum-norm/global"), **THEIR_EPS)


@of("vf")
def test_the_value_loss(get):
    mask = get("in/mask").bool()
    for theirs, ours in AGGREGATIONS:
        x = get("in/vpred").requires_grad_()
        output = value_loss(x, get("in/old"), get("in/ret"), mask, clip=float(get("in/clip")), weights=token_weights(mask, ours))
        torch.testing.assert_close(output.loss.detach(), get(f"out/{theirs}/loss"), **THEIR_EPS)
        if ours == "token-mean":
            output.loss.backward()
            torch.testing.assert_close(x.grad, get("out/token-mean/grad"), **THEIR_EPS)
            assert float(output.metrics["clip_fraction"]) == pytest.approx(float(get("out/token-mean/clipfrac")), abs=1e-6)


@of("kl")
def test_the_kl_estimates(get):
    for name in ("k1", "abs", "k2", "k3"):
        x, reference = get("in/logp").requires_grad_(), get("in/ref")
        kl = kl_estimate(x, reference, name)
        kl.sum().backward()
        # theirs clamps k3 to ±10 and its log-ratio to ±20; ours goes on
        same = torch.ones_like(x, dtype=torch.bool) if name != "k3" else ((reference - x).abs() < 20) & (kl < 10)
        torch.testing.assert_close(kl.detach()[same], get(f"out/{name}")[same], **EXACT)
        torch.testing.assert_close(x.grad[same], get(f"out/{name}/grad")[same], **EXACT)
        assert kl.isfinite().all()
        clamped = ~same & (reference > x)
        assert bool((x.grad[clamped] < -1).all())


@of("kl")
def test_the_straight_through_kl_estimates_that_raise_there(get):
    for name in ("k1", "k3"):
        x, y = get("in/logp").requires_grad_(), get("in/logp").requires_grad_()
        mixed, square = kl_estimate(x, get("in/ref"), f"{name}+"), kl_estimate(y, get("in/ref"), "k2")
        mixed.sum().backward()
        square.sum().backward()
        torch.testing.assert_close(mixed.detach(), kl_estimate(y.detach(), get("in/ref"), name), rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(x.grad, y.grad, **EXACT)

"""Estimators give the functions of `advantages` the right parts of an experience, and count episodes, not rows."""

from __future__ import annotations

import math
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from rlhf.errors import ConfigError, RLHFWarning
from rlhf.ppo import GAE, GRPO, RLOO, ReinforcePlusPlus, gae, grpo, reinforce_plus_plus, rloo, whiten


def experience(scores=(1.0, 0.0, 0.5, 0.25), group=(0, 0, 1, 1), episode=None, token_scores=None, loss_weights=None):
    rows = len(scores)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.tensor([6, 1, 4, 3, 2, 5, 6, 6])[:rows, None]
    mask[2, 1] = False
    rollout = SimpleNamespace(
        response_mask=mask,
        group=torch.tensor(group),
        episode=torch.arange(rows) if episode is None else torch.tensor(episode),
        truncated=torch.tensor([True, False] * 4)[:rows],
        extras={},
    )
    return SimpleNamespace(
        rollout=rollout,
        rewards=SimpleNamespace(scores=torch.tensor(scores), token_scores=token_scores),
        token_rewards=torch.randn(rows, 6, generator=generator) * mask,
        values=torch.where(mask, torch.randn(rows, 6, generator=generator), math.nan),
        last_values=torch.randn(rows, generator=generator),
        loss_weights=mask.float() if loss_weights is None else loss_weights * mask,
    )


def test_gae_whitens_advantages_and_leaves_returns():
    e = experience()
    mask = e.rollout.response_mask
    plain = gae(e.token_rewards, e.values, mask, gamma=0.9, lam=0.8)
    result = GAE(gamma=0.9, lam=0.8)(e)
    assert torch.equal(result.advantages, whiten(plain.advantages, mask))
    assert torch.equal(result.returns, plain.returns)
    raw = GAE(gamma=0.9, lam=0.8, whiten=False)(e)
    assert torch.equal(raw.advantages, plain.advantages)


def test_gae_bootstraps_truncated_rows_only_and_only_if_asked():
    e = experience()
    mask = e.rollout.response_mask
    after = torch.tensor([1.0, 0, 1, 0]) * e.last_values
    assert torch.equal(GAE(whiten=False, bootstrap="truncated")(e).returns, gae(e.token_rewards, e.values, mask, bootstrap=after).returns)
    e.last_values[1] = math.nan  # a row that ended by itself is not asked what comes after
    assert GAE(whiten=False, bootstrap="truncated")(e).returns.isfinite().all()
    assert torch.equal(GAE(whiten=False)(e).returns, gae(e.token_rewards, e.values, mask).returns)


def test_rows_that_are_not_trained_on_do_not_shift_the_moments():
    kept = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    e = experience(loss_weights=kept)
    e.token_rewards[1] = 1000.0 * e.rollout.response_mask[1]
    for estimator in (GAE(lam=0.9), ReinforcePlusPlus()):
        advantages = estimator(e).advantages[[0, 2, 3]]
        counted = advantages[e.rollout.response_mask[[0, 2, 3]]]
        assert float(counted.mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(counted.var(correction=0)) == pytest.approx(1.0, abs=1e-5)


def test_reinforce_plus_plus_whitens_unless_told_not_to():
    e = experience()
    mask = e.rollout.response_mask
    plain = reinforce_plus_plus(e.token_rewards, mask, gamma=0.9)
    assert torch.equal(ReinforcePlusPlus(gamma=0.9)(e).advantages, whiten(plain.advantages, mask))
    assert torch.equal(ReinforcePlusPlus(gamma=0.9, whiten=False)(e).advantages, plain.advantages)


@pytest.mark.parametrize(
    ("estimator", "function"),
    [
        (GRPO(), grpo),
        (GRPO(scale="none"), lambda s, g, m: grpo(s, g, m, scale="none")),
        (GRPO(ddof=0, eps=0.1), lambda s, g, m: grpo(s, g, m, ddof=0, eps=0.1)),
        (RLOO(), rloo),
    ],
)
def test_with_one_row_an_episode_the_estimator_is_the_function(estimator, function):
    e = experience()
    result = estimator(e)
    expected = function(e.rewards.scores, e.rollout.group, e.rollout.response_mask)
    assert torch.equal(result.advantages, expected.advantages)
    assert torch.equal(result.returns, expected.returns)
    assert result.advantages.shape == (4, 6)


def test_an_episode_of_several_rows_counts_once_in_its_groups_statistics():
    # Episode 7 forked into three rows. By episodes the mean is ½; by rows it would be ¾.
    e = experience(scores=(1.0, 1.0, 0.0, 1.0), group=(3, 3, 3, 3), episode=(7, 7, 2, 7))
    first = GRPO(scale="none")(e).advantages[:, 0]
    assert first.tolist() == [0.5, 0.5, -0.5, 0.5]
    assert RLOO()(e).advantages[:, 0].tolist() == [1.0, 1.0, -1.0, 1.0]


def test_a_row_without_a_score_gets_zero_and_leaves_the_rest():
    e = experience(scores=(math.nan, 1.0, 2.0, 3.0), group=(0, 0, 0, 0))
    torch.testing.assert_close(GRPO(eps=0.0)(e).advantages[:, 0], torch.tensor([0.0, -1.0, 0.0, 1.0]), rtol=0, atol=1e-6)


def test_rows_of_an_episode_with_different_scores_are_refused():
    e = experience(episode=(0, 0, 1, 2))
    with pytest.raises(ConfigError, match=r"rows \[0, 1\] belong to episode 0.*\[1.0, 0.0\].*the same score"):
        GRPO()(e)


@pytest.mark.parametrize("make", [GRPO, RLOO])
def test_groups_of_one_give_zero_and_one_warning_with_advice(make):
    estimator = make()
    e = experience(group=(5, 6, 7, 8))
    with pytest.warns(RLHFWarning, match=r"SamplingParams\(n=8\)"):
        result = estimator(e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(e)
    assert not result.advantages.any()


def test_an_episode_alone_in_its_group_warns_although_it_has_several_rows():
    with pytest.warns(RLHFWarning, match="every prompt has one only"):
        GRPO()(experience(scores=(1.0, 1.0, 0.0, 0.0), group=(0, 0, 1, 1), episode=(0, 0, 1, 1)))


def test_a_single_group_of_one_among_others_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advantages = GRPO()(experience(group=(0, 0, 0, 1))).advantages
    assert not advantages[3].any()


@pytest.mark.parametrize("estimator", [GRPO(), RLOO()])
def test_rewards_by_token_are_refused_with_advice(estimator):
    e = experience(token_scores=torch.zeros(4, 6))
    with pytest.raises(ConfigError, match=r"would ignore rewards by token; use GAE\(\) or ReinforcePlusPlus\(\)"):
        estimator(e)


def test_each_says_what_it_reads():
    assert [e.reads for e in (GAE, ReinforcePlusPlus, GRPO, RLOO)] == ["token_rewards", "token_rewards", "scores", "scores"]


@pytest.mark.parametrize(
    ("field", "estimator", "words"),
    [
        ("values", GAE(), "pass critic= to make_experience"),
        ("last_values", GAE(bootstrap="truncated"), "needs last_values"),
        ("token_rewards", GAE(), "with_advantages"),
        ("token_rewards", ReinforcePlusPlus(), "with_advantages"),
        ("rewards", GRPO(), "needs rewards"),
    ],
)
def test_what_the_experience_lacks_is_named_with_advice(field, estimator, words):
    e = experience()
    setattr(e, field, None)
    with pytest.raises(ConfigError, match=words):
        estimator(e)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GAE(gamma=1.1),
        lambda: GAE(lam=-1),
        lambda: GAE(bootstrap="all"),
        lambda: ReinforcePlusPlus(gamma=2),
        lambda: GRPO(scale="batch"),
        lambda: GRPO(ddof=3),
        lambda: GRPO(eps=-1.0),
    ],
)
def test_bad_options_raise_when_the_estimator_is_made(make):
    with pytest.raises(ConfigError, match="must be"):
        make()


@pytest.mark.parametrize("estimator", [GAE(lam=0.95), GRPO(scale="none"), RLOO(), ReinforcePlusPlus()])
def test_an_estimator_compares_by_its_options_and_can_be_pickled(estimator):
    copy = pickle.loads(pickle.dumps(estimator))
    assert copy == estimator
    assert hash(copy) == hash(estimator)
    assert "_warned" not in repr(estimator)


def test_planted_faults_are_seen():
    e = experience(scores=(1.0, 1.0, 0.0, 1.0), group=(3, 3, 3, 3), episode=(7, 7, 2, 7))
    by_rows = grpo(e.rewards.scores, e.rollout.group, e.rollout.response_mask, scale="none").advantages
    assert not torch.allclose(by_rows, GRPO(scale="none")(e).advantages)

"""Experience: what the models say of a rollout, once, and what estimators make of it, by hand."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from rlhf import (
    GAE,
    GRPO,
    RLOO,
    Actor,
    AdaptiveKL,
    Advantages,
    ConfigError,
    Critic,
    Experience,
    KLPenalty,
    PolicyLoss,
    ReinforcePlusPlus,
    RLHFWarning,
    Rollout,
    ShapeError,
    StaleRolloutError,
    make_experience,
)
from rlhf.errors import RewardError
from rlhf.ppo import Values
from tests.batches import ragged_rollout, rewards_of
from tests.models import tiny_model

NAN = math.nan


class Says:
    """A policy, reference or critic that says what it is told."""

    def __init__(self, numbers, last=None, weight_version=0):
        self.numbers, self.last, self.weight_version, self.calls = torch.tensor(numbers), last, weight_version, 0

    def logprobs(self, rollout):
        self.calls += 1
        return self.numbers

    def values(self, rollout):
        self.calls += 1
        return Values(self.numbers, torch.zeros(len(rollout)) if self.last is None else torch.tensor(self.last))


def rollout_of(*lengths, **fields):
    return Rollout.build([[5]] * len(lengths), [[6] * length for length in lengths], **fields)


def experience_of(rollout, scores=None, *, token_scores=None, logprobs=None, reference=None, values=None, last=None, **options):
    shape = rollout.response_ids.shape
    zeros = torch.zeros(shape).tolist()
    return make_experience(
        rollout,
        None if scores is None else rewards_of(scores, token_scores),
        actor=Says(zeros if logprobs is None else logprobs),
        reference=None if reference is None else Says(reference),
        critic=None if values is None else Says(values, last),
        **options,
    )


PLAIN = GAE(gamma=1.0, lam=0.95, whiten=False)


def close(tensor, expected, tolerance=1e-6):
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=0, atol=tolerance)


# ------------------------------------------------------------------ token rewards and advantages, by hand


def test_the_score_stands_on_the_last_real_token_not_on_the_padding():
    rollout = rollout_of(4, 8)  # a b c EOS PAD PAD PAD PAD beside a longer one
    experience = experience_of(rollout, [1.0, 0.0], values=[[0.0] * 8] * 2).with_advantages(PLAIN)
    close(experience.token_rewards, [[0, 0, 0, 1, 0, 0, 0, 0], [0] * 8])


def test_the_score_stands_on_the_last_token_that_was_sampled():
    rollout = Rollout.build([[5]], [[6, 7, 8, 9]], response_masks=[[True, True, False, False]])
    close(experience_of(rollout, [2.0], values=[[0.0] * 4]).with_advantages(PLAIN).token_rewards, [[0, 2, 0, 0]])


def test_kl_in_the_reward_and_gae_by_hand():
    experience = experience_of(
        rollout_of(3), [1.0], logprobs=[[-1.0, -1.0, -1.0]], reference=[[-1.1, -0.8, -1.3]], values=[[0.2, 0.4, 0.6]]
    ).with_advantages(PLAIN, kl=KLPenalty(0.05))
    close(experience.token_rewards, [[-0.005, 0.01, 0.985]])
    close(experience.advantages, [[0.7419625, 0.57575, 0.385]])
    close(experience.returns, [[0.9419625, 0.97575, 0.985]])


def test_a_token_that_the_reference_finds_unlikely_is_charged():
    """logp −1, reference −2, coefficient 0.1: −0.1, with the minus that one public text leaves out."""
    experience = experience_of(rollout_of(1), [0.0], logprobs=[[-1.0]], reference=[[-2.0]], values=[[0.0]])
    close(experience.with_advantages(PLAIN, kl=KLPenalty(0.1)).token_rewards, [[-0.1]])
    with pytest.raises(AssertionError):  # the check sees a flipped sign
        close(experience.with_advantages(PLAIN, kl=KLPenalty(0.1)).token_rewards, [[0.1]])


def test_gae_from_values_alone_by_hand():
    experience = experience_of(rollout_of(3), [1.0], values=[[0.5, 0.6, 0.7]])
    close(experience.with_advantages(PLAIN).advantages, [[0.46575, 0.385, 0.3]])
    close(experience.with_advantages(GAE(lam=1.0, whiten=False)).advantages, [[0.5, 0.4, 0.3]])
    close(experience.with_advantages(GAE(lam=0.0, whiten=False)).advantages, [[0.1, 0.1, 0.3]])


def test_a_value_on_the_padding_bootstraps_nothing():
    experience = experience_of(rollout_of(2, 3), [1.0, 0.0], values=[[0.0, 0.0, 100.0], [0.0] * 3])
    close(experience.with_advantages(PLAIN).advantages[0], [0.95, 1.0, 0.0])


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_trained_tokens_and_returns_do_not():
    experience = experience_of(rollout_of(3, 2, 4), [1.0, -1.0, None], values=[[0.3, 0.1, 0.2, 0.4]] * 3)
    whitened, plain = (experience.with_advantages(GAE(whiten=on)) for on in (True, False))
    trained = whitened.advantages[experience.loss_weights > 0]
    assert float(trained.mean()) == pytest.approx(0, abs=1e-6)
    assert float(trained.var(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(whitened.returns, plain.returns)


def test_grpo_by_hand_whatever_the_order_of_the_rows():
    rollout = rollout_of(1, 2, 1, 1, 1, 1, 1, 1, group=[0, 0, 0, 0, 7, 7, 7, 7])
    scores = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    wanted = torch.tensor([0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75])
    order = [4, 0, 5, 1, 6, 2, 7, 3]
    for rows in (list(range(8)), order):
        part = rollout.select(rows)
        experience = experience_of(part, [scores[i] for i in rows]).with_advantages(GRPO(scale="none"))
        close(experience.advantages, (wanted[rows][:, None] * part.response_mask).tolist())
    half = rollout_of(1, 1, 1, 1, group=[3] * 4)
    close(experience_of(half, [1, 0, 1, 0]).with_advantages(GRPO(eps=1e-4)).advantages[:, 0], [0.8658754, -0.8658754] * 2)


def test_equal_prompts_in_two_groups_are_not_compared():
    rollout = rollout_of(1, 1, 1, 1, group=[0, 0, 1, 1])
    assert not experience_of(rollout, [1, 1, 0, 0]).with_advantages(GRPO()).advantages.any()


def test_a_row_without_score_leaves_statistics_and_loss():
    rollout = rollout_of(1, 2, 1, 1, group=[0] * 4)
    experience = experience_of(rollout, [1.0, None, 0.0, 1.0]).with_advantages(GRPO(scale="none"))
    close(experience.advantages[:, 0], [0.3333333, 0.0, -0.6666667, 0.3333333])
    close(experience.loss_weights, [[1, 0], [0, 0], [1, 0], [1, 0]])
    assert bool(rollout.response_mask[1].all()), "the response mask is left alone"


def test_process_rewards_stand_where_they_were_given_and_on_tool_output_they_move_back():
    rollout = Rollout.build([[5]], [[6, 7, 8, 9]], response_masks=[[True, True, False, True]])
    tokens = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    experience = experience_of(rollout, [1.0], token_scores=tokens, values=[[0.0] * 4]).with_advantages(GAE(whiten=False))
    close(experience.token_rewards, tokens.tolist())
    close(experience.returns, [[1.0, 0.75, 0.0, 0.25]])  # 0.5 was received after the second token


def test_rewards_before_the_first_sampled_token_are_not_lost():
    rollout = Rollout.build([[5]], [[6, 7]], response_masks=[[False, True]])
    experience = experience_of(rollout, [1.0], token_scores=torch.tensor([[0.75, 0.25]]), values=[[0.0] * 2])
    close(experience.with_advantages(GAE(whiten=False)).returns, [[0.0, 1.0]])


def test_rejected_tokens_are_not_charged_for_their_kl():
    experience = experience_of(rollout_of(2), [0.0], logprobs=[[-1.0, -1.0]], reference=[[-2.0, -2.0]], values=[[0.0] * 2])
    experience.loss_weights[0, 0] = 0
    close(experience.with_advantages(PLAIN, kl=KLPenalty(0.1)).token_rewards, [[0.0, -0.1]])


def test_reinforce_plus_plus_reads_token_rewards():
    experience = experience_of(rollout_of(2, 1), [1.0, 0.5], logprobs=[[-1.0, -1.0], [-1.0, 0.0]], reference=[[-2.0, -1.0], [-1.0, 0.0]])
    result = experience.with_advantages(ReinforcePlusPlus(whiten=False), kl=KLPenalty(0.1))
    close(result.returns, [[0.9, 1.0], [0.5, 0.0]])


# ------------------------------------------------------------------ truncation


def test_truncated_rows_count_on_the_value_after_their_last_token():
    rollout = rollout_of(2, 2, finish_reasons=["length", "stop"])
    experience = experience_of(rollout, [0.0, 0.0], values=[[0.0] * 2] * 2, last=[5.0, 5.0])
    close(experience.with_advantages(GAE(whiten=False, bootstrap="truncated")).returns, [[5.0, 5.0], [0.0, 0.0]])
    close(experience.with_advantages(GAE(whiten=False)).returns, [[0.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("estimator", [GAE(bootstrap="truncated"), GAE(), GRPO()])
def test_an_all_truncated_batch_has_a_defined_result(estimator):
    rollout = rollout_of(3, 3, group=[0, 0], finish_reasons="length")
    experience = experience_of(rollout, [0.0, 1.0], values=[[0.1] * 3] * 2, last=[0.2, 0.3]).with_advantages(estimator)
    assert experience.advantages.isfinite().all()
    assert experience.advantages.any()


# ------------------------------------------------------------------ the KL controller


def test_the_controller_hears_once_of_the_mean_over_tokens_then_rows():
    """Rows of 1 and 3 tokens at 0.8 and 0.2 nats: (0.8 + 0.2) / 2 = 0.5, not the 0.35 of all tokens; an empty row is no row."""
    heard = []
    controller = SimpleNamespace(coef=0.1, update=lambda kl, rows: heard.append((kl, rows)), state_dict=dict, load_state_dict=print)
    rollout = rollout_of(1, 3, 0)
    logprobs = [[-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.0] * 3]
    reference = [[-1.8, 0.0, 0.0], [-1.2, -1.2, -1.2], [0.0] * 3]
    experience = experience_of(rollout, [0.0, 0.0, 0.0], logprobs=logprobs, reference=reference, values=[[0.0] * 3] * 3)
    experience.with_advantages(PLAIN, kl=KLPenalty(controller))
    assert heard == [(pytest.approx(0.5, abs=1e-6), 2)]


def test_an_adaptive_coefficient_moves_after_it_was_used():
    experience = experience_of(rollout_of(1, 1), [0.0] * 2, logprobs=[[-1.0]] * 2, reference=[[-2.0]] * 2, values=[[0.0]] * 2)
    penalty = KLPenalty(AdaptiveKL(0.1, target=0.5, horizon=10))
    first = experience.with_advantages(PLAIN, kl=penalty)
    close(first.token_rewards, [[-0.1], [-0.1]])
    assert penalty.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert first.metrics()["kl/coef"] == pytest.approx(0.1)
    assert experience.with_advantages(PLAIN, kl=penalty).metrics()["kl/coef"] == pytest.approx(0.104)


# ------------------------------------------------------------------ one set of forward passes


def test_several_estimators_share_one_set_of_forward_passes_and_leave_it_untouched():
    rollout = rollout_of(2, 2, group=[0, 0])
    actor, reference, critic = Says([[-1.0] * 2] * 2), Says([[-1.5] * 2] * 2), Says([[0.5] * 2] * 2)
    experience = make_experience(rollout, rewards_of([1.0, 0.0]), actor=actor, reference=reference, critic=critic)
    before = {name: value.clone() for name, value in experience._tensors().items()}
    results = [
        experience.with_advantages(GAE(), kl=KLPenalty(0.1)),
        experience.with_advantages(GRPO()),
        experience.with_advantages(RLOO()),
        experience.with_advantages(lambda e: Advantages(e.token_rewards, e.token_rewards)),
    ]
    assert actor.calls == reference.calls == critic.calls == 1
    assert experience.advantages is experience.returns is experience.token_rewards is None
    assert experience.extras == {}
    for name, value in experience._tensors().items():
        assert torch.equal(value, before[name]), name
    assert len({tuple(result.advantages.flatten().tolist()) for result in results}) == 4


def test_an_estimator_of_ones_own_reads_token_rewards_and_is_cleared_off_the_mask():
    rollout = rollout_of(1, 2)
    everywhere = experience_of(rollout, [1.0, 2.0]).with_advantages(lambda e: Advantages(torch.ones(2, 2), e.token_rewards + 7))
    close(everywhere.advantages, [[1, 0], [1, 1]])
    close(everywhere.returns, [[8, 0], [7, 9]])
    with pytest.raises(ShapeError, match=r"must return advantages of shape \[2, 2\], \[B, T\]; got \[2\]"):
        experience_of(rollout, [1.0, 2.0]).with_advantages(lambda e: Advantages(torch.ones(2), torch.ones(2)))


# ------------------------------------------------------------------ what is refused


def test_estimators_of_whole_scores_refuse_kl_and_token_rewards():
    rollout = rollout_of(1, 1, group=[0, 0])
    experience = experience_of(rollout, [1.0, 0.0], reference=[[0.0]] * 2)
    with pytest.raises(ConfigError, match=r"GRPO reads one score a response, so kl= has no place to act; .*PolicyLoss\(kl_coef"):
        experience.with_advantages(GRPO(), kl=KLPenalty(0.1))
    tokens = experience_of(rollout, [1.0, 0.0], token_scores=torch.tensor([[1.0], [0.0]]))
    with pytest.raises(ConfigError, match="GRPO reads one score a response and would ignore rewards by token"):
        tokens.with_advantages(GRPO())


def test_what_is_missing_is_named_with_the_argument_that_brings_it():
    rollout = rollout_of(2)
    with pytest.raises(ConfigError, match="with_advantages needs rewards; pass them to make_experience"):
        experience_of(rollout).with_advantages(GRPO())
    with pytest.raises(ConfigError, match=r"pass reference=actor.reference\(\) to make_experience"):
        experience_of(rollout, [1.0], values=[[0.0] * 2]).with_advantages(GAE(), kl=KLPenalty(0.1))
    with pytest.raises(ConfigError, match="pass critic= to make_experience"):
        experience_of(rollout, [1.0]).with_advantages(GAE())


def test_a_group_of_one_has_no_advantage_and_says_so_once():
    estimator = GRPO()
    experience = experience_of(rollout_of(1, 1), [1.0, 0.0])
    with pytest.warns(RLHFWarning, match="every prompt has one only: all advantages are 0"):
        result = experience.with_advantages(estimator)
    assert not result.advantages.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experience.with_advantages(estimator)


@pytest.mark.parametrize(
    "version, current, allowed, refused",
    [
        (5, 5, 0, False),
        (4, 5, 0, True),
        (4, 5, 1, False),
        (3, 5, 1, True),
        (3, 5, None, False),
        (6, 5, 0, True),
        (6, 5, 10, True),
        (-1, 5, 10, True),
        (-1, 5, None, False),
    ],
)
def test_rows_of_older_unknown_or_future_weights_are_refused_unless_allowed(version, current, allowed, refused):
    rollout = rollout_of(1, 1, weight_version=[current, version])
    actor = Says([[0.0]] * 2, weight_version=current)
    if not refused:
        assert len(make_experience(rollout, actor=actor, max_staleness=allowed)) == 2
        return
    with pytest.raises(
        StaleRolloutError, match=rf"1 of 2 rows were not sampled by the current weights \(version {current}\).*max_staleness="
    ):
        make_experience(rollout, actor=actor, max_staleness=allowed)


def test_a_rollout_is_stale_after_an_update():
    actor = Actor(tiny_model("qwen2"))
    rollout = ragged_rollout(prompts=1, n=2)
    experience = make_experience(rollout, rewards_of([1.0, 0.0]), actor=actor).with_advantages(GRPO())
    actor.update(experience)
    with pytest.raises(RuntimeError, match=r"they are \[1\] optimiser steps old, at most 0 allowed"):
        make_experience(rollout, actor=actor)
    assert len(make_experience(rollout, actor=actor, max_staleness=1)) == 2


class Correction:
    """Halves every token and rejects the second row."""

    def weights(self, old_logprobs, rollout):
        kept = rollout.response_mask.clone()
        kept[1] = False
        return torch.full_like(old_logprobs, 0.5) * (old_logprobs - rollout.logprobs).exp(), kept


def test_filtered_rows_are_refused_without_a_correction():
    rollout = rollout_of(1, 2, filtered=[False, True], logprobs=[[-1.0], [-1.0, -1.0]])
    with pytest.raises(ConfigError, match="1 of 2 rows were sampled under top-p, top-k or min-p"):
        experience_of(rollout)
    assert len(experience_of(rollout, correction=Correction())) == 2


def test_a_correction_sets_importance_weights_and_rejects_through_the_loss_weights_only():
    rollout = rollout_of(2, 2, logprobs=[[-1.0, -1.0]] * 2)
    mask = rollout.response_mask.clone()
    experience = experience_of(rollout, [1.0, 0.0], logprobs=[[-1.0, -0.5]] * 2, correction=Correction())
    close(experience.importance_weights, [[0.5, 0.5 * math.exp(0.5)]] * 2)
    close(experience.loss_weights, [[1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(rollout.response_mask, mask)
    with pytest.raises(ConfigError, match="the rollout holds no log-probabilities of the engine"):
        experience_of(rollout_of(1), correction=Correction())


def test_the_engines_log_probabilities_can_stand_for_the_actors():
    rollout = rollout_of(2, logprobs=[[-0.5, -0.25]])
    actor = Says([[0.0, 0.0]])
    assert make_experience(rollout, actor=actor, old_logprobs="rollout").old_logprobs.tolist() == [[-0.5, -0.25]]
    assert actor.calls == 0
    with pytest.raises(ConfigError, match="use old_logprobs='actor'"):
        make_experience(rollout_of(1), actor=actor, old_logprobs="rollout")
    with pytest.raises(ConfigError, match="old_logprobs must be one of 'actor', 'rollout'; got 'engine'"):
        make_experience(rollout, actor=actor, old_logprobs="engine")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"old_logprobs": torch.zeros(2, 3)}, r"old_logprobs must be \[2, 2\] like the rollout; got \[2, 3\]"),
        ({"last_values": torch.zeros(2, 2)}, r"last_values must be \[2\]"),
        ({"loss_weights": torch.zeros(2)}, r"loss_weights must be \[2, 2\]"),
        ({"rewards": rewards_of([1.0])}, "rewards must have one score for each of the 2 responses; got 1"),
        ({"rewards": rewards_of([1.0, 1.0, 1.0])}, "rewards must have one score for each of the 2 responses; got 3"),
        ({"rewards": rewards_of([1.0, 1.0], torch.zeros(2, 5))}, r"token_scores must be \[2, 2\] like the rollout; got \[2, 5\]"),
    ],
)
def test_parts_of_another_shape_are_refused(fields, message):
    with pytest.raises(ShapeError, match=message):
        Experience(rollout=rollout_of(1, 2), **fields)


def test_a_score_that_is_nan_but_ok_is_refused_where_it_is_made():
    with pytest.raises(RewardError, match="row 1 is nan, OK"):
        rewards_of([1.0, NAN])


# ------------------------------------------------------------------ edges


def test_an_empty_response_has_nothing_to_carry_its_reward_and_is_reported():
    experience = experience_of(rollout_of(0, 2), [1.0, 1.0], values=[[0.0] * 2] * 2)
    with pytest.warns(RLHFWarning, match=r"1 responses have no sampled token to carry their reward; it is dropped \(rows \[0\]\)"):
        result = experience.with_advantages(PLAIN)
    close(result.token_rewards, [[0, 0], [0, 1]])
    assert result.advantages.isfinite().all()


def test_a_response_of_the_end_token_alone_trains():
    actor = Actor(tiny_model("qwen2"))
    rollout = Rollout.build([[5], [5]], [[1], [7, 1]], group=[0, 0])
    experience = make_experience(rollout, rewards_of([0.0, 1.0]), actor=actor).with_advantages(GRPO())
    assert experience.advantages[0, 0] < 0
    metrics = actor.update(experience)
    assert math.isfinite(metrics["actor/loss"])
    assert metrics["actor/grad_norm"] > 0


def test_a_batch_without_a_trainable_token_warns_and_changes_nothing():
    actor = Actor(tiny_model("qwen2"))
    rollout = rollout_of(2, 1, group=[0, 0])
    with pytest.warns(RLHFWarning, match="no token of this experience can be trained on"):
        experience = make_experience(rollout, rewards_of([None, None]), actor=actor)
    metrics = actor.update(experience.with_advantages(GRPO()))
    assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0.0
    assert actor.weight_version == 0


def test_no_rows_make_an_experience_that_no_update_takes():
    actor, critic = Actor(tiny_model("qwen2")), Critic(tiny_model("qwen2"))
    experience = make_experience(Rollout.build([], []), rewards_of([]), actor=actor, critic=critic, reference=actor)
    for result in (experience.with_advantages(GAE(), kl=KLPenalty(0.1)), experience.with_advantages(GRPO())):
        assert len(result) == 0
        assert result.metrics()["experience/trained_tokens"] == 0
        with pytest.raises(ConfigError, match="the batch has no responses"):
            actor.update(result)


def test_a_mini_batch_larger_than_the_batch_is_refused():
    experience = experience_of(rollout_of(1, 1, group=[0, 0]), [1.0, 0.0]).with_advantages(GRPO())
    with pytest.raises(ConfigError, match="between 1 and the 2 responses of the batch; got 4"):
        Actor(tiny_model("qwen2")).update(experience, mini_batch_size=4)


def test_a_loss_says_what_the_experience_lacks():
    actor = Actor(tiny_model("qwen2"))
    experience = experience_of(rollout_of(1, 1, group=[0, 0]), [1.0, 0.0])
    with pytest.raises(ConfigError, match=r"call experience.with_advantages\(estimator\) before the update"):
        actor.update(experience)
    with pytest.raises(ConfigError, match="ref_logprobs"):
        actor.update(experience.with_advantages(GRPO()), PolicyLoss(kl_coef=0.1))


# ------------------------------------------------------------------ the object


def test_select_picks_the_same_rows_of_everything():
    rollout = rollout_of(1, 2, 3)
    experience = experience_of(rollout, [1.0, 2.0, 3.0], values=[[1.0] * 3, [2.0] * 3, [3.0] * 3], last=[7.0, 8.0, 9.0])
    experience.extras |= {"tensor": torch.tensor([1, 2, 3]), "list": ["a", "b", "c"]}
    for indices in ([2, 0], torch.tensor([2, 0])):
        part = experience.select(indices)
        assert part.rollout.lengths.tolist() == [3, 1]
        assert part.rewards.scores.tolist() == [3.0, 1.0]
        assert part.values[:, 0].tolist() == [3.0, 1.0]
        assert part.last_values.tolist() == [9.0, 7.0]
        assert (part.extras["tensor"].tolist(), part.extras["list"]) == ([3, 1], ["c", "a"])
    assert experience.select([False, True, False]).values[:, 0].tolist() == [2.0]
    assert experience.select(slice(1, None)).extras["list"] == ["b", "c"]
    assert len(experience.select([])) == 0
    with pytest.raises(ValueError, match="3 rows"):
        experience.select([3])


def test_to_the_cpu_is_the_same_object():
    experience = experience_of(rollout_of(1), [1.0])
    assert experience.to("cpu") is experience


def test_the_repr_says_what_is_there():
    experience = experience_of(rollout_of(1, 3), [1.0, 2.0])
    assert repr(experience) == "Experience(2 responses × 3 tokens; old_logprobs)"
    assert repr(Experience(rollout=rollout_of(1))) == "Experience(1 responses × 1 tokens; no tensors yet)"


def test_metrics_by_hand():
    rollout = rollout_of(2, 1, 1, 1, group=[0, 0, 1, 1], logprobs=[[-1.0, -1.0], [-1.0], [-1.0], [-1.5]])
    values = [[0.0, 0.0], [0.0, 99.0], [1.0, 99.0], [1.0, 99.0]]
    logprobs = [[-1.0, -1.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]
    reference = [[-1.5, -1.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]
    experience = experience_of(rollout, [1.0, 1.0, 0.0, 2.0], logprobs=logprobs, reference=reference, values=values)
    metrics = experience.with_advantages(GAE(whiten=False)).metrics()
    assert metrics["experience/trained_tokens"] == 5
    assert metrics["kl/reference_k1"] == pytest.approx(0.5 / 5)
    assert metrics["kl/reference_k3"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 5)
    assert metrics["mismatch/engine_abs_logratio"] == pytest.approx(0.5 / 5)
    # returns 1 1 | 1 | 0 | 2, values 0 0 | 0 | 1 | 1: errors 1 1 1 −1 1, variance 0.64; returns' variance 0.4
    assert metrics["critic/explained_variance"] == pytest.approx(1 - 0.64 / 0.4)
    assert metrics["advantage/mean"] == pytest.approx(0.6)
    assert metrics["advantage/std"] == pytest.approx(0.8)
    assert metrics["group/zero_variance_rate"] == 0.5


@pytest.mark.parametrize(
    "scores, group, expected",
    [
        ([1, 1, 0, 1], [0, 0, 1, 1], 0.5),
        ([1, 1, 1, 1], [0, 0, 1, 1], 1.0),
        ([1, 0, 1, 1], [0, 1, 2, 2], 1.0),  # groups of one are no groups
        ([1, None, 0, 1], [0, 0, 1, 1], 0.0),  # neither is one known score
        ([1, 0], [0, 1], 0.0),
        ([None, None], [0, 0], 0.0),
    ],
)
def test_the_rate_of_groups_without_variance(scores, group, expected):
    rollout = rollout_of(*[1] * len(scores), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert experience_of(rollout, scores).metrics()["group/zero_variance_rate"] == expected


def test_explained_variance_of_constant_returns_is_undefined():
    experience = experience_of(rollout_of(1, 1), [1.0, 1.0], values=[[0.5], [0.5]]).with_advantages(GAE(whiten=False))
    assert math.isnan(experience.metrics()["critic/explained_variance"])
    perfect = experience_of(rollout_of(1, 1), [1.0, 0.0], values=[[1.0], [0.0]]).with_advantages(GAE(whiten=False))
    assert perfect.metrics()["critic/explained_variance"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"actor": None}, "actor must be an Actor; got NoneType"),
        ({"rewards": torch.ones(2)}, r"rewards must be what reward\(rollout\) returns; got Tensor"),
        ({"reference": True}, "reference must be anything with logprobs"),
        ({"critic": object()}, "critic must be a Critic; got object"),
        ({"correction": True}, "correction must be an ImportanceCorrection; got bool"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"rollout": [1]}, "rollout must be a Rollout; got list"),
    ],
)
def test_arguments_of_another_kind_are_named(options, message):
    arguments = {"rollout": Rollout.build([[1]] * 2, [[2]] * 2), "rewards": None, "actor": Says([[0.0]] * 2)} | options
    rollout, rewards = arguments.pop("rollout"), arguments.pop("rewards")
    with pytest.raises(ConfigError, match=message):
        make_experience(rollout, rewards, **arguments)


@pytest.mark.parametrize(
    "estimator, kl, error, message",
    [
        (GRPO, None, ConfigError, r"got the class GRPO; write GRPO\(\)"),
        ("grpo", None, ConfigError, "estimator must be a callable.*got 'grpo'"),
        (GAE(), 0.1, ConfigError, r"kl must be a KLPenalty; got 0.1\. Write kl=KLPenalty"),
        (lambda experience: None, None, ShapeError, r"must return Advantages\(advantages, returns\).*got NoneType"),
        (lambda experience: Advantages(torch.tensor([[NAN], [0.0]]), torch.zeros(2, 1)), None, ShapeError, "must return finite advantages"),
    ],
)
def test_what_an_estimator_of_ones_own_gets_wrong_is_named(estimator, kl, error, message):
    experience = Experience(rollout=Rollout.build([[1]] * 2, [[2]] * 2), rewards=rewards_of([1.0, 0.0]))
    with pytest.raises(error, match=message):
        experience.with_advantages(estimator, kl=kl)


def test_nan_that_an_estimator_makes_of_a_row_without_a_score_goes_no_further():
    experience = Experience(rollout=Rollout.build([[1]] * 2, [[2]] * 2), rewards=rewards_of([1.0, None]))
    advantages = experience.with_advantages(lambda e: Advantages(e.rewards.scores[:, None], e.rewards.scores[:, None])).advantages
    assert advantages.tolist() == [[1.0], [0.0]]

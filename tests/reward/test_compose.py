"""Sums, weights and routes: what the whole says, and that the parts stay as they were."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from rlhf.errors import ConfigError, DataError, RewardError, RLHFWarning
from rlhf.reward import GSM8K, Format, RewardFunction, Rewards, Router, Status, WeightedSum
from rlhf.rollout import Rollout

NAN = math.nan


class Column(RewardFunction):
    """The value that the row holds under the reward's name; a missing one is an error."""

    def score(self, sample):
        value = sample.row[self.name]
        sample.log("value", value)
        return value


class A(Column):
    pass


class B(Column):
    pass


def rollout_of(*rows: dict, lengths=None, **options) -> Rollout:
    lengths = lengths or [2] * len(rows)
    return Rollout.build([[1]] * len(rows), [[5] * length for length in lengths], rows=rows, texts=[""] * len(rows), **options)


def test_a_sum_weighs_its_parts_and_keeps_their_own_scores():
    rewards = (0.9 * A() + 0.1 * B())(rollout_of({"A": 1, "B": 0}, {"A": 0, "B": 1}, {"A": 1, "B": 1}))
    assert rewards.scores.tolist() == [pytest.approx(0.9, abs=1e-7), pytest.approx(0.1, abs=1e-7), 1.0]
    assert rewards.parts["A"].tolist() == [1.0, 0.0, 1.0]
    assert rewards.parts["B"].tolist() == [0.0, 1.0, 1.0]
    assert rewards.metrics()["reward/part/A"] == pytest.approx(2 / 3, abs=1e-12)


def test_all_ways_to_write_a_sum_agree():
    rollout = rollout_of({"A": 3, "B": 5})
    a, b = A(), B()
    for reward, expected in [
        (a + b, 8.0),
        (sum([a, b]), 8.0),
        (a - b, -2.0),
        (-a, -3.0),
        (-(a - b), 2.0),
        (a * 2, 6.0),
        (2 * a + b * 3, 21.0),
        (0.5 * (a + 2 * b), 6.5),
        (np.float64(2) * a, 6.0),
        (np.float32(0.5) * a, 1.5),
        (a * torch.tensor(2.0), 6.0),
        (0 * a + b, 5.0),
        (WeightedSum([(2, a), (1, b)]), 11.0),
    ]:
        assert reward(rollout).scores.tolist() == [expected], reward


def test_nested_sums_become_one():
    a, b = A(), B()
    nested = 0.5 * (a + 2 * (b - a)) + b
    assert [(weight, part.name) for weight, part in nested.terms] == [(0.5, "A"), (1.0, "B"), (-1.0, "A"), (1.0, "B")]
    assert nested.part_names() == ["A", "B", "A_2", "B_2"]
    assert list(nested(rollout_of({"A": 1, "B": 1})).parts) == ["A", "B", "A_2", "B_2"]
    assert repr(0.9 * A() + 0.1 * B()) == "0.9 * A() + 0.1 * B()"


def test_a_name_that_is_taken_already_is_not_given_twice():
    parts = (A() + A(name="A_2") + A())(rollout_of({"A": 1, "A_2": 2})).parts
    assert {name: scores.tolist() for name, scores in parts.items()} == {"A": [1.0], "A_2": [2.0], "A_3": [1.0]}


def test_two_gsm8k_parts_have_names_of_their_own():
    reward = GSM8K() + 0.5 * GSM8K("flexible")
    rewards = reward(Rollout.build([[1]], [[2]], texts=["It is 42"], rows=[{"ground_truth": "42"}]))
    assert {name: scores.tolist() for name, scores in rewards.parts.items()} == {"GSM8K": [0.0], "GSM8K_2": [1.0]}
    assert rewards.scores.tolist() == [0.5]


def test_composing_changes_no_part_and_a_part_may_stand_in_two_sums():
    a = A()
    before = dict(vars(a))
    first, second = 2 * a, a + B()
    rollout = rollout_of({"A": 1, "B": 4})
    assert first(rollout).scores.tolist() == [2.0]
    assert second(rollout).scores.tolist() == [5.0]
    assert vars(a) == before
    assert (3 * first)(rollout).scores.tolist() == [6.0]
    assert first(rollout).scores.tolist() == [2.0]


def test_a_part_that_abstains_drops_out_and_all_abstaining_abstain():
    rewards = (0.9 * A() + 0.1 * B())(rollout_of({"A": None, "B": 1}, {"A": 1, "B": None}, {"A": None, "B": None}))
    assert rewards.status == [Status.OK, Status.OK, Status.ABSTAIN]
    assert rewards.scores.tolist()[:2] == [pytest.approx(0.1, abs=1e-7), pytest.approx(0.9, abs=1e-7)]
    assert math.isnan(rewards.scores[2])
    assert rewards.parts["A"].isnan().tolist() == [True, False, True]


def test_an_error_in_one_part_makes_the_sum_an_error_whatever_its_weight():
    with pytest.warns(RLHFWarning, match="reward A failed on 1 of 2") as caught:
        rewards = (0 * A() + B())(rollout_of({"B": 1}, {"A": 1, "B": 2}))
    assert len(caught) == 1
    assert rewards.status == [Status.ERROR, Status.OK]
    assert rewards.parts["B"].tolist() == [1.0, 2.0]
    assert rewards.errors[0].startswith("KeyError: 'A'")
    assert rewards.metrics()["reward/error_rate"] == 0.5


class Given(RewardFunction):
    """A reward that answers with statuses it was made with, as one that runs elsewhere does."""

    def __init__(self, *status):
        self.status = status

    def __call__(self, rollout):
        scores = torch.tensor([1.0 if status is Status.OK else NAN for status in self.status])
        return Rewards(scores, list(self.status), {"Given": scores})


@pytest.mark.parametrize(
    ("left", "right", "together"),
    [
        ("ok", "ok", "ok"),
        ("ok", "abstain", "ok"),
        ("abstain", "abstain", "abstain"),
        ("timeout", "ok", "timeout"),
        ("timeout", "abstain", "timeout"),
        ("error", "timeout", "error"),
        ("abstain", "error", "error"),
    ],
)
def test_statuses_combine_the_same_way_round_either_way(left, right, together):
    rollout = rollout_of({})
    for first, second in [(left, right), (right, left)]:
        rewards = (Given(Status(first)) + Given(Status(second)))(rollout)
        assert rewards.status == [Status(together)]


def test_a_part_whose_failure_was_given_a_score_counts_in_the_sum_and_in_the_rate():
    with pytest.warns(RLHFWarning):
        rewards = (A(on_error=0.25) + B())(rollout_of({"B": 1}))
    assert rewards.scores.tolist() == [1.25]
    assert rewards.metrics()["reward/error_rate"] == 1.0


def test_token_scores_add_and_a_plain_part_stands_on_the_last_token_that_counts():
    rollout = rollout_of(
        {"A": [1.0, 2.0], "B": 10.0},
        {"A": [1.0, 2.0, 3.0], "B": 10.0},
        {"A": [1.0], "B": None},
        lengths=[2, 3, 1],
        response_masks=[[True, True], [True, True, False], [True]],
    )
    rewards = (A() + 0.5 * B())(rollout)
    assert rewards.token_scores.tolist() == [[1.0, 7.0, 0.0], [1.0, 7.0, 3.0], [1.0, 0.0, 0.0]]
    assert rewards.scores.tolist() == [8.0, 11.0, 1.0]
    assert torch.equal(rewards.token_scores.sum(1), rewards.scores)


def test_a_row_whose_sum_is_an_error_has_zero_token_scores():
    with pytest.warns(RLHFWarning):
        rewards = (A() + B())(rollout_of({"A": [1.0, 2.0]}, {"A": [3.0, 4.0], "B": 1}))
    assert rewards.token_scores.tolist() == [[0.0, 0.0], [3.0, 5.0]]


def test_names_logged_by_two_parts_stay_apart():
    logged = (A() + B())(rollout_of({"A": 1, "B": 2})).logged
    assert logged == {"value": [1], "value_2": [2]}


def test_a_sum_judges_episodes_as_its_parts_do():
    rewards = (A() + B())(rollout_of({"A": 9, "B": 9}, {"A": 1, "B": 2}, {"A": 0, "B": 0}, episode=[0, 0, 1], group=[0, 0, 0]))
    assert rewards.scores.tolist() == [3.0, 3.0, 0.0]
    assert rewards.metrics()["reward/mean"] == 1.5


@pytest.mark.parametrize("weight", [NAN, math.inf, "0.5", True, None, [1.0], 1j])
def test_a_weight_that_is_no_finite_number_is_refused(weight):
    with pytest.raises(ConfigError, match="the weight of A must be a finite number"):
        A() * weight


def test_only_rewards_can_be_added():
    for add in (lambda: A() + 0.5, lambda: 0.5 + A(), lambda: A() - 1, lambda: A() + len):
        with pytest.raises(ConfigError, match=r"takes rewards|only rewards can be added"):
            add()
    with pytest.raises(ConfigError, match="must be a finite number"):
        A() * B()
    with pytest.raises(ConfigError, match="at least one"):
        WeightedSum([])


def test_a_sum_too_large_for_float32_raises_rather_than_training_on_infinity():
    with pytest.raises(RewardError, match="scores must be finite"):
        (1e10 * A())(rollout_of({"A": 1e30}))


def test_with_the_documented_weights_a_well_formed_wrong_answer_earns_less_than_a_badly_formed_right_one():
    reward = 0.9 * GSM8K() + 0.1 * Format(r"<think>[^<]+</think>[^<]+")
    texts = ["<think>hm</think>#### 41", "#### 42", "<think>hm</think>#### 42", "41"]
    scores = reward(Rollout.build([[1]] * 4, [[2]] * 4, texts=texts, rows=[{"ground_truth": "42"}] * 4)).scores.tolist()
    assert scores == [pytest.approx(0.1, abs=1e-7), pytest.approx(0.9, abs=1e-7), 1.0, 0.0]


# Router


def sourced(*sources: str | None, **values) -> Rollout:
    rows = [{"data_source": source, "A": 1.0 + i, "B": -1.0 - i} for i, source in enumerate(sources)]
    return rollout_of(*rows, **values)


def test_each_source_goes_to_its_reward_and_rows_keep_their_places():
    rewards = Router({"a": A(), "b": B()})(sourced("a", "b", "b", "a"))
    assert rewards.scores.tolist() == [1.0, -2.0, -3.0, 4.0]
    assert rewards.parts["A"].nan_to_num(9.0).tolist() == [1.0, 9.0, 9.0, 4.0]
    assert rewards.parts["B"].nan_to_num(9.0).tolist() == [9.0, -2.0, -3.0, 9.0]
    assert rewards.logged == {"value": [1.0, -2.0, -3.0, 4.0]}


def test_a_group_is_seen_whole_through_a_router():
    class Size(RewardFunction):
        def score_group(self, samples):
            return [float(len(samples))] * len(samples)

    size = Size()
    rollout = sourced("a", "b", "a", "b", "b", group=[0, 1, 0, 1, 1])
    assert Router({"a": size, "b": size})(rollout).scores.tolist() == [2.0, 3.0, 2.0, 3.0, 3.0]
    assert Router({"a": size}, default=Size())(rollout).scores.tolist() == [2.0, 3.0, 2.0, 3.0, 3.0]


def test_an_unknown_source_raises_and_lists_the_known_ones():
    router = Router({"openai/gsm8k": GSM8K(), "math": A()})
    message = (
        r"no reward for data_source 'gsm8k' \(2 rows, first row 1\), None \(1 rows, first row 2\); known sources: 'openai/gsm8k', 'math'"
    )
    with pytest.raises(DataError, match=message):
        router(sourced("math", "gsm8k", None, "gsm8k"))
    with pytest.raises(DataError, match="add a route or pass default="):
        router.check([{"data_source": "math"}, {"data_source": "gsm8k"}])


def test_a_default_takes_unknown_and_missing_sources():
    assert Router({"a": A()}, default=B())(sourced("a", "z", None)).scores.tolist() == [1.0, -2.0, -3.0]


def test_check_reaches_the_rewards_of_the_routes_and_of_sums_before_the_first_rollout():
    router = Router({"a": A(), "g": 0.9 * GSM8K() + 0.1 * A()})
    router.check([{"data_source": "a"}, {"data_source": "g", "ground_truth": "42"}])
    with pytest.raises(DataError, match="1 of 1 rows have none: row 0: 'forty'"):
        router.check([{"data_source": "a"}, {"data_source": "g", "ground_truth": "forty"}])


def test_part_names_do_not_depend_on_the_order_of_the_rows():
    router = Router({"a": A(), "b": A()}) + A()
    assert router.part_names() == ["A", "A_2", "A_3"]
    for sources in (["a", "b"], ["b", "a"], ["b"]):
        parts = router(sourced(*sources)).parts
        assert parts["A_2"].isnan().tolist() == [source != "b" for source in sources]
        assert not parts["A_3"].isnan().any()


def test_a_router_in_a_sum_and_a_sum_in_a_router():
    rollout = sourced("a", "b")
    assert (2 * Router({"a": A(), "b": B()}) + A())(rollout).scores.tolist() == [3.0, -2.0]
    assert Router({"a": A() + B(), "b": 0.5 * B()})(rollout).scores.tolist() == [0.0, -1.0]


def test_process_rewards_beside_plain_ones_through_a_router():
    rows = [{"data_source": "a", "A": [1.0, 2.0]}, {"data_source": "b", "B": 5.0}]
    rewards = Router({"a": A(), "b": B()})(rollout_of(*rows))
    assert rewards.token_scores.tolist() == [[1.0, 2.0], [0.0, 5.0]]


def test_episodes_keep_their_numbers_through_a_router():
    rollout = sourced("b", "a", "b", episode=[4, 9, 4], group=[0, 1, 0])
    rewards = Router({"a": A(), "b": B()})(rollout)
    assert rewards.episode.tolist() == [4, 9, 4]
    assert rewards.scores.tolist() == [-3.0, 2.0, -3.0]


def test_a_router_of_nothing_or_of_no_rewards_is_refused_and_an_empty_rollout_is_not():
    with pytest.raises(ConfigError, match="at least one route"):
        Router({})
    with pytest.raises(ConfigError, match="the route 'a' must be a reward"):
        Router({"a": len})
    with pytest.raises(ConfigError, match="the route 'default' must be a reward"):
        Router({"a": A()}, default=0.0)
    assert len(Router({"a": A()})(Rollout.build([], []))) == 0


def test_another_key_may_name_the_source():
    rollout = rollout_of({"ability": "sums", "A": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Router({"sums": A()}, key="ability")(rollout).scores.tolist() == [1.0]

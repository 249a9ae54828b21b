"""The method a user writes, all that it may return or raise, and what the rewards say of it."""

from __future__ import annotations

import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from rlhf.errors import ConfigError, RewardError, RLHFWarning
from rlhf.reward import FunctionReward, RewardFunction, Sample, Status, verifier
from rlhf.rollout import FinishReason, Rollout

NAN = math.nan


def rollout_of(count: int = 2, **options) -> Rollout:
    """`count` one-token prompts; response i has i + 1 tokens and the text "r<i>"."""
    options.setdefault("texts", [f"r{i}" for i in range(count)])
    return Rollout.build([[1]] * count, [list(range(10, 11 + i)) for i in range(count)], **options)


class Returns(RewardFunction):
    """Gives the results it was made with, one after the other."""

    def __init__(self, *results, on_error=None):
        super().__init__(on_error=on_error)
        self.results = list(results)

    def score(self, sample):
        result = self.results[int(sample.response[1:])]
        if isinstance(result, BaseException):
            raise result
        return result


class Broken(RewardFunction):
    def score(self, sample):
        raise ValueError("no judge at home")


@verifier
def module_level(sample):
    """Pays every response."""
    return 1.0


def faulty(*results, **options):
    """The rewards of a reward that gives these results, and the one warning it makes."""
    with pytest.warns(RLHFWarning) as caught:
        rewards = Returns(*results, **options)(rollout_of(len(results)))
    assert len(caught) == 1
    return rewards, str(caught[0].message)


def test_one_method_is_a_reward():
    class Length(RewardFunction):
        def score(self, sample):
            return len(sample.response_ids) / 2

    rewards = Length()(rollout_of(3))
    assert rewards.scores.tolist() == [0.5, 1.0, 1.5]
    assert rewards.scores.dtype == torch.float32
    assert rewards.status == [Status.OK] * 3
    assert list(rewards.parts) == ["Length"]
    assert rewards.token_scores is None
    assert rewards.errors == [None] * 3


def test_an_empty_rollout_gives_empty_rewards():
    rewards = Returns()(Rollout.build([], []))
    assert len(rewards) == 0
    assert rewards.scores.shape == (0,)


@pytest.mark.parametrize(
    "result", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0), torch.tensor(True)]
)
def test_every_scalar_is_a_score(result):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards = Returns(result)(rollout_of(1))
    assert rewards.scores.tolist() == [1.0]
    assert rewards.status == [Status.OK]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (NAN, "score must be finite in float32, got nan"),
        (math.inf, "score must be finite in float32, got inf"),
        (-math.inf, "score must be finite in float32, got -inf"),
        (1e39, "score must be finite in float32, got 1e+39"),
        (10**400, "score must be finite in float32, got inf"),
        ("1.0", "score must be a number, None or a list of numbers, got str"),
        ({"score": 1.0}, "score must be a number, None or a list of numbers, got dict"),
        (1j, "got complex"),
        (np.array([1.0]), "got ndarray; call .tolist() for a process reward"),
        (torch.tensor([1.0]), "got Tensor; call .tolist() for a process reward"),
        ([1.0, 2.0], "a process reward must have one entry for each of the 1 response tokens, got 2"),
        ([], "a process reward must have one entry for each of the 1 response tokens, got 0"),
        ([NAN], "entry 0 is nan"),
        (["1"], "entry 0 is '1'"),
        ([[1.0]], "entry 0 is [1.0]"),
    ],
)
def test_a_result_that_is_no_score_is_an_error_with_its_reason_never_a_zero(result, reason):
    rewards, message = faulty(result, 0.25)
    assert rewards.status == [Status.ERROR, Status.OK]
    assert math.isnan(rewards.scores[0])
    assert rewards.scores[1] == 0.25
    assert reason in rewards.errors[0]
    assert rewards.errors[1] is None
    assert "reward Returns failed on 1 of 2 samples; row 0: " in message
    assert reason in message
    assert rewards.metrics()["reward/error_rate"] == 0.5
    assert rewards.metrics()["reward/mean"] == 0.25


def test_the_entries_of_a_process_reward_must_have_a_finite_sum():
    rewards, _ = faulty(0.0, [3e38, 3e38])
    assert rewards.status == [Status.OK, Status.ERROR]
    assert "the entries sum to 6e+38" in rewards.errors[1]


def test_none_abstains_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rewards = Returns(None, 1.0)(rollout_of())
    assert rewards.status == [Status.ABSTAIN, Status.OK]
    assert math.isnan(rewards.scores[0])
    metrics = rewards.metrics()
    assert (metrics["reward/abstain_rate"], metrics["reward/error_rate"], metrics["reward/mean"]) == (0.5, 0.0, 1.0)


def test_one_raising_sample_of_eight_leaves_the_others_alone():
    rewards, message = faulty(*[1.0] * 5, RuntimeError("judge\nis down"), *[0.0] * 2)
    assert rewards.status.count(Status.OK) == 7
    assert rewards.status[5] is Status.ERROR
    assert rewards.metrics()["reward/error_rate"] == 1 / 8
    assert rewards.errors[5].startswith("RuntimeError: judge\nis down\nTraceback")
    assert "in score" in rewards.errors[5]
    assert "row 5: RuntimeError: judge;" in message


def test_an_exception_that_cannot_be_printed_is_still_only_an_error():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    rewards, _ = faulty(Mute(), 1.0)
    assert rewards.status == [Status.ERROR, Status.OK]
    assert rewards.errors[0].startswith("Mute: (its message cannot be printed)")


def test_a_warning_names_the_uid_of_the_first_failing_row():
    rows = [{"uid": "a7"}, {"uid": "b8"}]
    with pytest.warns(RLHFWarning, match=r"reward Returns failed on 1 of 2 samples; row 1 \(uid b8\)"):
        Returns(1.0, NAN)(rollout_of(rows=rows))


def test_a_verifier_that_calls_sys_exit_is_an_error_and_an_interrupt_is_not():
    rewards, _ = faulty(SystemExit(0), 1.0)
    assert rewards.status == [Status.ERROR, Status.OK]
    with pytest.raises(KeyboardInterrupt):
        Returns(KeyboardInterrupt())(rollout_of(1))


@pytest.mark.parametrize("result", [NAN, "text", ValueError("broken")])
def test_on_error_raise_names_the_reward_and_the_row(result):
    with pytest.raises(RewardError, match="Returns failed on row 1: ") as caught:
        Returns(1.0, result, on_error="raise")(rollout_of())
    assert caught.value.__cause__ is (result if isinstance(result, ValueError) else None)


def test_on_error_abstain_has_no_score_and_is_still_counted():
    rewards, _ = faulty(NAN, 1.0, on_error="abstain")
    assert rewards.status == [Status.ABSTAIN, Status.OK]
    assert math.isnan(rewards.scores[0])
    assert "got nan" in rewards.errors[0]
    metrics = rewards.metrics()
    assert (metrics["reward/error_rate"], metrics["reward/abstain_rate"]) == (0.5, 0.5)


def test_on_error_may_be_a_score_and_is_still_counted():
    rewards, _ = faulty(ValueError("broken"), 1.0, on_error=-0.5)
    assert rewards.status == [Status.OK, Status.OK]
    assert rewards.scores.tolist() == [-0.5, 1.0]
    assert rewards.metrics()["reward/error_rate"] == 0.5


@pytest.mark.parametrize("policy", ["ignore", NAN, math.inf, True, [0.0], 1e39])
def test_another_on_error_is_refused(policy):
    with pytest.raises(ConfigError, match="on_error must be one of 'record', 'raise', 'abstain'"):
        Returns(1.0, on_error=policy)


def test_on_error_of_a_class_body_counts_and_is_checked():
    class Lenient(Broken):
        on_error = 0.0

    class Misspelt(Broken):
        on_error = "rase"

    with pytest.warns(RLHFWarning):
        assert Lenient()(rollout_of(1)).scores.tolist() == [0.0]
    with pytest.raises(ConfigError, match="did you mean 'raise'"):
        Misspelt()(rollout_of(1))


def test_a_subclass_need_not_call_our_init():
    class Own(RewardFunction):
        def __init__(self, bonus):
            self.bonus = bonus

        def score(self, sample):
            return self.bonus

    reward = Own(2.0)
    assert (reward.name, reward.on_error) == ("Own", "record")
    assert reward(rollout_of(1)).scores.tolist() == [2.0]


def test_names_come_from_the_class_the_body_or_the_keyword():
    class Named(Broken):
        name = "manners"

    class Child(Named):
        pass

    assert (Broken().name, Named().name, Child().name, Broken(name="judge").name) == ("Broken", "manners", "Child", "judge")
    assert Broken.name == "Broken"


def test_a_reward_without_a_method_to_judge_cannot_be_made():
    class Idle(RewardFunction):
        pass

    for cls in (Idle, RewardFunction):
        with pytest.raises(TypeError, match="judges nothing: define score"):
            cls()


def test_an_async_score_is_refused_at_once():
    class Remote(RewardFunction):
        async def score(self, sample):
            return 1.0

    async def judge(sample):
        return 1.0

    with pytest.raises(TypeError, match="async score, which is not awaited"):
        Remote()
    with pytest.raises(ConfigError, match="async judge, which is not awaited"):
        verifier(judge)


def test_a_reward_called_with_anything_but_a_rollout_says_what_to_do():
    with pytest.raises(RewardError, match=r"judges a Rollout, got Sample; for one Sample call .score\(sample\)"):
        Broken()(Sample("", "text"))


def test_a_process_reward_keeps_its_entries_and_scores_their_sum():
    rewards = Returns([0.5], [0.25, 0.5])(rollout_of())
    assert rewards.scores.tolist() == [0.5, 0.75]
    assert rewards.token_scores.tolist() == [[0.5, 0.0], [0.25, 0.5]]


def test_beside_process_rewards_a_plain_score_stands_on_the_last_sampled_token():
    rollout = Rollout.build(
        [[1]] * 3, [[5, 6], [5, 6, 7], [5, 6, 7]], response_masks=[[True] * 2, [True, True, False], [False] * 3], texts=["r0", "r1", "r2"]
    )
    rewards = Returns([1.0, 2.0], 4.0, 8.0)(rollout)
    assert rewards.token_scores.tolist() == [[1.0, 2.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 8.0]]
    assert rewards.scores.tolist() == [3.0, 4.0, 8.0]


def test_a_row_without_a_score_has_zero_token_scores():
    rewards, _ = faulty(NAN, [1.0, 2.0])
    assert rewards.token_scores.tolist() == [[0.0, 0.0], [1.0, 2.0]]


def test_an_empty_response_is_judged_too():
    rollout = Rollout.build([[1], [1]], [[], [5]], texts=["r0", "r1"])
    assert Returns(0.5, 1.0)(rollout).scores.tolist() == [0.5, 1.0]
    assert Returns([], [1.0])(rollout).scores.tolist() == [0.0, 1.0]
    assert Returns(None, [1.0])(rollout).token_scores.tolist() == [[0.0], [1.0]]


def test_a_group_reward_sees_whole_groups_by_id_in_the_order_of_the_rollout():
    seen = []

    class Rank(RewardFunction):
        def score_group(self, samples):
            seen.append([sample.response for sample in samples])
            return [float(place) for place in range(len(samples))]

    rewards = Rank()(rollout_of(5, group=[7, 3, 7, 3, 3]))
    assert seen == [["r0", "r2"], ["r1", "r3", "r4"]]
    assert rewards.scores.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0]


def test_results_of_a_group_reward_are_read_like_those_of_score():
    class Mixed(RewardFunction):
        def score_group(self, samples):
            return [None, NAN, [1.0, 1.0, 1.0], 0.5]

    with pytest.warns(RLHFWarning, match="Mixed failed on 1 of 4"):
        rewards = Mixed()(rollout_of(4, group=[0] * 4))
    assert rewards.status == [Status.ABSTAIN, Status.ERROR, Status.OK, Status.OK]


@pytest.mark.parametrize("results", [torch.tensor([0.0, 1.0]), np.array([0.0, 1.0]), (0.0, 1.0)])
def test_a_group_reward_may_return_a_flat_tensor_or_array(results):
    class Group(RewardFunction):
        def score_group(self, samples):
            return results

    assert Group()(rollout_of(group=[0, 0])).scores.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("result", "got"), [([1.0], "1 results"), ([1.0] * 9, "9 results"), (1.0, "float"), (None, "NoneType"), ({}, "dict")]
)
@pytest.mark.parametrize("on_error", ["record", "raise", 0.0])
def test_a_wrong_count_for_a_group_raises_naming_the_reward_expected_and_got(result, got, on_error):
    class Short(RewardFunction):
        def score_group(self, samples):
            return result

    with pytest.raises(RewardError, match=f"Short.score_group must return a list of 8 results, one for each sample; got {got}"):
        Short(on_error=on_error)(rollout_of(8, group=[0] * 8))


def test_a_group_that_raises_is_an_error_for_its_own_samples_only():
    class Picky(RewardFunction):
        def score_group(self, samples):
            if samples[0].response == "r0":
                raise ValueError("not these")
            return [1.0] * len(samples)

    with pytest.warns(RLHFWarning, match="Picky failed on 2 of 3"):
        rewards = Picky()(rollout_of(3, group=[0, 1, 0]))
    assert rewards.status == [Status.ERROR, Status.OK, Status.ERROR]


def test_a_sample_shows_what_the_rollout_holds():
    seen = []

    @verifier
    def look(sample):
        seen.append(sample)
        return 0.0

    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "6 * 7?"}, {"type": "image"}]},
    ]
    rows = [{"prompt": "2 + 2?", "ground_truth": 0}, {"prompt": chat, "reward_model": {"ground_truth": "42"}}, {}, {"prompt": [1, 2]}]
    look(
        Rollout.build(
            [[1]] * 4,
            [[5], [6, 7], [], [8]],
            rows=rows,
            texts=["4", "42", "", "x"],
            raw_texts=["4</s>", "42</s>", "", "x"],
            finish_reasons=["stop", "length", "stop", "stop"],
        )
    )
    assert [sample.prompt for sample in seen] == ["2 + 2?", "Be brief.\n6 * 7?", "", ""]
    assert [sample.ground_truth for sample in seen] == [0, "42", None, None]
    assert [sample.response for sample in seen] == ["4", "42", "", "x"]
    assert [sample.raw_response for sample in seen] == ["4</s>", "42</s>", "", "x"]
    assert [sample.response_ids.tolist() for sample in seen] == [[5], [6, 7], [], [8]]
    assert [sample.finish_reason for sample in seen][:2] == [FinishReason.STOP, FinishReason.LENGTH]
    assert (seen[0].messages, seen[1].messages) == (None, chat)
    assert seen[1].row is rows[1]


def test_an_episode_is_judged_once_by_its_last_row_and_its_rows_share_the_score():
    seen = []

    class Watch(RewardFunction):
        def score(self, sample):
            seen.append(sample.response)
            return 0.5 if sample.response == "r2" else 1.0

    rollout = rollout_of(4, episode=[0, 1, 0, 2], group=[0, 0, 0, 1])
    rewards = Watch()(rollout)
    assert seen == ["r1", "r2", "r3"]
    assert rewards.scores.tolist() == [0.5, 1.0, 0.5, 1.0]
    assert rewards.metrics()["reward/mean"] == pytest.approx(2.5 / 3, abs=1e-12)


def test_a_group_reward_counts_episodes_not_rows():
    class Size(RewardFunction):
        def score_group(self, samples):
            return [float(len(samples))] * len(samples)

    assert Size()(rollout_of(3, episode=[0, 0, 1], group=[0, 0, 0])).scores.tolist() == [2.0, 2.0, 2.0]


def test_the_process_reward_of_an_episode_belongs_to_its_last_row_and_the_earlier_row_has_the_sum_at_its_end():
    rewards = Returns(None, [0.25, 0.5])(rollout_of(episode=[0, 0], group=[0, 0]))
    assert rewards.scores.tolist() == [0.75, 0.75]
    assert rewards.token_scores.tolist() == [[0.75, 0.0], [0.25, 0.5]]


def test_logged_numbers_become_metrics_and_other_values_columns():
    @verifier
    def judge(sample):
        sample.log("steps", len(sample.response_ids))
        if sample.response == "r1":
            sample.log("comment", "fine")
            sample.log("ratio", 2.0)
        return 1.0

    rewards = judge(rollout_of(3))
    assert rewards.logged == {"steps": [1, 2, 3], "comment": [None, "fine", None], "ratio": [None, 2.0, None]}
    metrics = rewards.metrics()
    assert (metrics["reward/log/steps"], metrics["reward/log/ratio"]) == (2.0, 2.0)
    assert "reward/log/comment" not in metrics


def test_verifier_takes_a_function_with_or_without_options():
    @verifier(name="short", on_error=0.25)
    def long_name(sample):
        raise ValueError("broken")

    assert isinstance(module_level, FunctionReward)
    assert (module_level.name, module_level.__doc__) == ("module_level", "Pays every response.")
    assert module_level(rollout_of(1)).scores.tolist() == [1.0]
    with pytest.warns(RLHFWarning, match="reward short failed"):
        assert long_name(rollout_of(1)).scores.tolist() == [0.25]
    with pytest.raises(ConfigError, match="takes a function of one Sample, got int"):
        verifier(3)
    with pytest.raises(ConfigError, match="takes a function of one Sample, got FunctionReward"):
        verifier(module_level)


def plain_function(sample):
    return 0.75


def test_verifiers_survive_pickling_both_as_a_decorator_and_as_a_call():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    copy = pickle.loads(pickle.dumps(verifier(plain_function)))
    assert copy(rollout_of(1)).scores.tolist() == [0.75]
    assert (pickle.loads(pickle.dumps(0.5 * module_level)))(rollout_of(1)).scores.tolist() == [0.5]

"""pass@k against enumeration, and what an evaluation says of a scripted engine."""

from __future__ import annotations

from itertools import combinations

import pytest

import rlhf
from rlhf.errors import ConfigError


@pytest.mark.parametrize("correct", range(5))
@pytest.mark.parametrize("k", range(1, 5))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(correct: int, k: int) -> None:
    answers = [True] * correct + [False] * (4 - correct)
    subsets = list(combinations(answers, k))
    assert rlhf.pass_at_k(correct, 4, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_one_right_answer_among_eight_is_certain_to_be_found_in_eight() -> None:
    # resampling with replacement, as a public framework does, gives .656 here
    assert rlhf.pass_at_k(1, 8, 8) == 1.0


@pytest.mark.parametrize("arguments", [(5, 4, 1), (-1, 4, 1), (1, 4, 0), (1, 4, 5)])
def test_pass_at_k_refuses_impossible_counts(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="pass@k needs"):
        rlhf.pass_at_k(*arguments)


class Right(rlhf.RewardFunction):
    def score(self, sample: rlhf.Sample) -> float:
        return float(sample.response == "right")


def test_an_evaluation_reports_mean_pass_at_k_lengths_and_faults() -> None:
    engine = rlhf.FakeEngine(responses=["right", "no", "no", "no", "no", "no", "no", "no"])
    evaluation = rlhf.EvalSet(["a", "b"], sampling=rlhf.SamplingParams(n=4, max_new_tokens=3))
    metrics = evaluation.run(lambda prompts, sampling: engine.generate(prompts, sampling), Right())
    # "right" is cut to 3 characters, so nothing is right
    assert metrics["mean"] == 0.0
    assert metrics["pass@4"] == 0.0
    assert metrics["truncation_rate"] == pytest.approx(1 / 8)
    engine = rlhf.FakeEngine(responses=["right", "no", "no", "no", "no", "no", "no", "no"])
    metrics = rlhf.EvalSet(["a", "b"], sampling=rlhf.SamplingParams(n=4)).run(engine.generate, Right())
    assert metrics["mean"] == pytest.approx(1 / 8)
    assert metrics["pass@1"] == pytest.approx(1 / 8)
    assert metrics["pass@2"] == pytest.approx(0.25)
    assert metrics["pass@4"] == pytest.approx(0.5)
    assert metrics["error_rate"] == 0.0


def test_an_evaluation_tells_the_parts_of_a_sum_apart() -> None:
    engine = rlhf.FakeEngine(responses=["right", "no!", "no", "no"])
    metrics = rlhf.EvalSet(["a"], sampling=rlhf.SamplingParams(n=4)).run(engine.generate, 0.9 * Right() + 0.1 * rlhf.Format("no!"))
    assert metrics["part/Right"] == pytest.approx(0.25)
    assert metrics["part/Format"] == pytest.approx(0.25)
    assert metrics["mean"] == pytest.approx(0.25)
    alone = rlhf.EvalSet(["a"]).run(engine.generate, Right())
    assert not [name for name in alone if name.startswith("part/")]


def test_an_evaluation_counts_a_failing_reward_and_scores_it_zero() -> None:
    class Broken(rlhf.RewardFunction):
        def score(self, sample: rlhf.Sample) -> float:
            raise RuntimeError("verifier fell over")

    with pytest.warns(rlhf.RLHFWarning):
        metrics = rlhf.EvalSet(["a"]).run(rlhf.FakeEngine().generate, Broken())
    assert metrics["error_rate"] == 1.0
    assert metrics["mean"] == 0.0


def test_a_single_text_is_not_a_set_of_prompts() -> None:
    with pytest.raises(ConfigError, match="put it in a list"):
        rlhf.EvalSet("abc")


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one prompt"):
        rlhf.EvalSet([])

"""GSM8K pays exactly the right number, from public failures of public graders to all of the data set."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from rlhf.errors import ConfigError, DataError, RewardError, RLHFWarning
from rlhf.reward import GSM8K, Sample, Status
from rlhf.rollout import Rollout

STRICT, FLEXIBLE = GSM8K(), GSM8K("flexible")


def score(reward: GSM8K, response: str, gold: object) -> float:
    return reward.score(Sample("", response, gold))


# Each row made a public grader pay a wrong answer or miss a right one. The flexible reading agrees on all of them.
@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        ("Total is\n#### 1,234", "1234", 1.0),
        ("#### $42", "42", 1.0),
        ("####42", "42", 1.0),
        ("####  42", "42", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### −5", "-5", 1.0),
        ("#### 3/4", "3", 0.0),
        ("#### 3/4", "0.75", 1.0),
        ("#### 1e3", "1000", 1.0),
        ("#### 1.50", "1.5", 1.0),
        ("#### 42 apples", "42", 1.0),
        ("#### \\boxed{42}", "42", 1.0),
        ("2+40=42\n#### 42\n" + "and the reasoning above confirms it. " * 20, "42", 1.0),
        ("#### .", ".", 0.0),
        ("(1,2)", "12", 0.0),
        ("somewhere between 10-20", "-20", 0.0),
        ("due on 2024-01-05", "-5", 0.0),
        ("So profit is 70000\n#### 70000", "He paid 80,000+50,000=$<<80000+50000=130000>>130,000\n#### 70000", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### ４２", "42", 1.0),
        ("#### nan", "5", 0.0),
        ("#### infinity", "5", 0.0),
        ("#### " + "9" * 5000, "5", 0.0),
        ("#### " + "9" * 5000, "9" * 5000, 1.0),
        ("#### 1e400", "1e500", 0.0),
        ("#### 1e400", "10e399", 1.0),
    ],
)
def test_what_public_graders_get_wrong(response, gold, expected):
    assert score(STRICT, response, gold) == expected
    assert score(FLEXIBLE, response, gold) == expected


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The answer is 72, in total, so the farmer earns that much.", "72"),
        ("It comes to $1,234.50", "1234.5"),
        ("the total cost of the order is $29.00.", "29"),
        ("#### Answer\nIt is 11.", "11"),
        ("It is 11.\n#### Done", "11"),
        ("#### Step 3: add 5 + 6\nSo 5 + 6 = 11", "11"),
    ],
)
def test_flexible_reads_the_last_number_where_no_marked_line_holds_one(response, gold):
    assert score(FLEXIBLE, response, gold) == 1.0
    assert score(STRICT, response, gold) == 0.0


@pytest.mark.parametrize(
    "guesses", ["1 2 72", "72 or 73", "73 or 72", "71, 72", "72 and 73", "72/73 or 72", "70-75", "71\t72", "72 = 73 or 72"]
)
@pytest.mark.parametrize("gold", ["72", "73", "1", "71", "70"])
def test_a_list_of_guesses_pays_nothing(guesses, gold):
    reward = GSM8K(format_score=0.1)
    assert score(reward, f"#### {guesses}", gold) == 0.0
    assert score(FLEXIBLE, f"#### {guesses}", gold) == 0.0


def test_the_last_marked_answer_counts():
    assert score(STRICT, "#### 41\nno, wait\n#### 42", "42") == 1.0
    assert score(STRICT, "#### 42\nno, wait\n#### 41", "42") == 0.0
    assert score(STRICT, "#### 42\n#### I do not know", "42") == 0.0


@pytest.mark.parametrize(
    "response", ["####\n42", "####\n\n  **42**", "#### 42 ####", "#### 42\n####", "##### 42", "**#### 42**", "＃＃＃＃ 42"]
)
def test_the_marked_line_is_the_first_with_content_after_the_last_marker_with_any(response):
    assert score(STRICT, response, "42") == 1.0


def test_no_marker_or_nothing_behind_it_is_a_wrong_answer_in_strict_mode():
    for response in ("", "42", "####", "####\n\n", "### 42", "The answer is 42."):
        assert score(STRICT, response, "42") == 0.0


def test_equality_is_exact_without_rounding_tolerance_or_percent_leniency():
    for response, gold in [
        ("10001", "10000"),
        ("2024.2", "2024"),
        ("500", "5"),
        ("42%", "0.42"),
        ("0.667", "2/3"),
        ("3", "3.2"),
        ("-7", "7"),
    ]:
        assert score(STRICT, f"#### {response}", gold) == 0.0
    for response, gold in [("42%", "42"), ("6/8", "3/4"), ("4/6", "2/3"), ("$7.50", "7.5"), ("-7", "-7")]:
        assert score(STRICT, f"#### {response}", gold) == 1.0


def test_format_score_is_for_a_wrong_answer_that_is_a_number():
    reward = GSM8K(format_score=0.1)
    assert [score(reward, response, "42") for response in ("#### 42", "#### 41", "#### forty-two", "#### 41 or 43", "41")] == [
        1.0,
        0.1,
        0.0,
        0.0,
        0.0,
    ]
    assert score(GSM8K("flexible", 0.1), "I say 41", "42") == 0.1


def test_the_marker_is_a_parameter_and_starts_a_word():
    reward = GSM8K(marker="A:")
    assert score(reward, "6 * 7 = 42\nA: 42", "42") == 1.0
    assert score(reward, "A: 42\nUSA: 5", "42") == 1.0
    assert score(reward, "#### 42", "42") == 0.0
    assert score(reward, "A: 42", "some work\nA: 42") == 1.0
    assert score(reward, "A: 42", "some work\n#### 42") == 1.0
    assert score(GSM8K(marker="答案："), "答案：42。", "42") == 1.0


@pytest.mark.parametrize("gold", [42, 42.0, "42", "42.", "$42", "work\n#### 42", torch.tensor(42)])
def test_gold_may_be_a_number_its_text_or_the_worked_solution(gold):
    assert score(STRICT, "#### 42", gold) == 1.0
    assert score(STRICT, "#### 43", gold) == 0.0


def test_a_gold_that_cannot_be_used_is_an_error_and_never_a_zero():
    golds = [None, "forty-two", "41 or 42", math.nan, "42"]
    rollout = Rollout.build([[1]] * 5, [[2]] * 5, texts=["#### 42"] * 5, rows=[{"ground_truth": gold} for gold in golds])
    with pytest.warns(RLHFWarning, match="GSM8K failed on 4 of 5 samples; row 0: RewardError: GSM8K found no gold answer"):
        rewards = STRICT(rollout)
    assert rewards.status == [Status.ERROR] * 4 + [Status.OK]
    assert "needs a gold answer that is one number; got 'forty-two'" in rewards.errors[1]
    with pytest.raises(RewardError, match="found no gold answer"):
        score(STRICT, "no answer", None)


def test_check_finds_bad_golds_before_the_first_rollout():
    STRICT.check([{"ground_truth": "42"}, {"reward_model": {"ground_truth": "work\n#### 1,000"}}, {"ground_truth": 0}])
    with pytest.raises(DataError, match="2 of 3 rows have none: row 0: None; row 2: 'many'"):
        STRICT.check([{}, {"ground_truth": "1"}, {"ground_truth": "many"}])


@pytest.mark.parametrize(
    "options", [{"mode": "lenient"}, {"format_score": 1.0}, {"format_score": math.nan}, {"format_score": "0"}, {"marker": " "}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        GSM8K(**options)


@pytest.mark.parametrize(
    "unit",
    ["1", "-", "1,", "123,456,", "1 ", "-1 ", "1-2 ", "1 + ", "1/2 ", "x1 ", "1.", "#", "#### ", "#### 1\n", "$",
     "\\boxed{", "\\text{", "\\frac{", "<", "<<", "<a", "=", "(", "a", "A:", "\n", "４", "½", "a\u0315\u0300", "ﷺ"],
)  # fmt: skip
@pytest.mark.parametrize("reward", [STRICT, FLEXIBLE, GSM8K("flexible", marker="A:")], ids=["strict", "flexible", "A:"])
def test_reading_is_linear_in_the_length_of_the_response(unit, reward):
    text = "#### 1" + unit * (1_000_000 // len(unit))
    start = time.process_time()
    assert score(reward, text, "5") == 0.0
    assert time.process_time() - start < 1.0  # a million characters; a quadratic reader takes hours


def test_a_thousand_samples_take_well_under_a_second():
    text = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day. " * 8 + "\n#### 18"
    rollout = Rollout.build([[1]] * 1024, [[2, 3]] * 1024, texts=[text] * 1024, rows=[{"ground_truth": "18"}] * 1024)
    for reward in (STRICT, FLEXIBLE):
        start = time.process_time()
        assert reward(rollout).scores.sum() == 1024
        assert time.process_time() - start < 1.0


def gold_answers(shared) -> list[str]:
    lines = [
        line
        for name in ("train", "test")
        for line in (shared / "data" / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [json.loads(line)["answer"] for line in lines]


def test_every_gold_answer_of_gsm8k_pays_and_its_neighbour_does_not(shared):
    answers = gold_answers(shared)
    assert len(answers) == 8792
    for answer in answers:
        work, final = answer.split("#### ")
        value = int(final.replace(",", ""))
        assert score(STRICT, answer, answer) == 1.0, final
        assert score(STRICT, f"#### {value}", answer) == 1.0, final
        assert score(STRICT, f"{work}#### {value + 1}", answer) == 0.0, final
        assert score(FLEXIBLE, f"{work}so it is {value + 1}.", final) == 0.0, final
        assert score(FLEXIBLE, f"{work}so it is {final}.", final) == 1.0, final


def test_labelled_solutions_of_four_models_are_judged_as_their_labels_say(shared):
    lines = (shared / "data" / "gsm8k" / "example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    reward = GSM8K("flexible", marker="A:")
    judged, disagreements = 0, []
    for line in lines:
        row = json.loads(line)
        for model, answer in row.items():
            if isinstance(answer, dict):
                judged += 1
                if (score(reward, answer["solution"], row["ground_truth"]) == 1.0) != answer["is_correct"]:
                    disagreements.append((model, answer))
    assert judged == 5276
    assert disagreements == []

"""The form of a response, by regular expression."""

from __future__ import annotations

import re
import time

import pytest

from rlhf.errors import ConfigError
from rlhf.reward import Format, Sample
from rlhf.rollout import Rollout

# One think block and one answer block, neither empty, nothing else: bounded by excluding the tags, so no block can swallow another.
ONE_OF_EACH = r"<think>\s*(?:(?!\s*</?(?:think|answer)>).)+\s*</think>\s*<answer>\s*(?:(?!\s*</?(?:think|answer)>).)+\s*</answer>"


def score(reward: Format, raw: str, response: str = "") -> float:
    return reward.score(Sample("", response, raw_response=raw))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n<answer>\n1\n</answer>", 1.0),
        ("<think>\na\n</think>\n<think>\nb\n</think>\n<answer>\n1\n</answer>\n<answer>\n2\n</answer>", 0.0),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 0.0),
        ("</think>\nabc\n<think>\n<answer>\n1\n</answer>", 0.0),
        ("<think>\nabc\n<answer>\n1\n</answer>", 0.0),
        ("Sure! <think>a</think><answer>1</answer>", 0.0),
        ("<think>a</think><answer>1</answer> Bye.", 0.0),
        ("", 0.0),
    ],
)
def test_think_and_answer_blocks_once_each_in_order_and_not_empty(text, expected):
    assert score(Format(ONE_OF_EACH), text) == expected


def test_the_raw_response_is_matched_because_tags_may_be_special_tokens():
    assert score(Format("<think>.+</think>42"), "<think>6 * 7</think>42", response="6 * 742") == 1.0
    rollout = Rollout.build([[1]], [[2]], texts=["6 * 742"], raw_texts=["<think>6 * 7</think>42</s>"])
    assert Format("<think>.+</think>42")(rollout).scores.tolist() == [1.0]


def test_without_a_raw_response_the_response_is_matched():
    assert Format("42").score(Sample("", "42")) == 1.0


def test_blanks_and_end_tokens_are_not_part_of_the_form():
    assert score(Format("42"), "\n 42 <|im_end|>\n") == 1.0
    assert score(Format("42"), "42<|eot_id|><|end_of_text|>") == 1.0
    assert score(Format("42"), "42<END>") == 0.0
    assert score(Format("42", end_tokens=("<END>",)), "42<END>") == 1.0
    assert score(Format("42", end_tokens=()), "42</s>") == 0.0


def test_full_describes_the_whole_response_and_search_finds_it_somewhere():
    assert score(Format(r"\d+"), "it is 42") == 0.0
    assert score(Format(r"\d+", match="search"), "it is 42") == 1.0
    assert score(Format("a|ab"), "ab") == 1.0


def test_the_dot_matches_newlines_unless_the_pattern_was_compiled_without():
    assert score(Format("a.b"), "a\nb") == 1.0
    assert score(Format(re.compile("a.b")), "a\nb") == 0.0
    assert score(Format(re.compile("AB", re.IGNORECASE)), "ab") == 1.0


@pytest.mark.parametrize("pattern", ["(unclosed", "*", None, 3, b"bytes"])
def test_a_pattern_that_is_none_is_refused_when_the_reward_is_made(pattern):
    with pytest.raises(ConfigError, match="pattern must be a regular expression for text"):
        Format(pattern)


def test_other_options_are_checked_too():
    with pytest.raises(ConfigError, match="match must be one of 'full', 'search'; got 'fullmatch'; did you mean 'full'"):
        Format("a", match="fullmatch")
    for end_tokens in ("</s>", ("",), (3,)):
        with pytest.raises(ConfigError, match="end_tokens must be a tuple of texts"):
            Format("a", end_tokens=end_tokens)


@pytest.mark.parametrize("unit", ["a", "</s>", "</s> ", " ", "<think>"])
def test_a_million_characters_take_less_than_a_second(unit):
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()
    assert score(Format(ONE_OF_EACH), text) == 0.0
    assert time.process_time() - start < 1.0

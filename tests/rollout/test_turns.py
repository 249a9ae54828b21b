"""Episodes of several turns become rows: merged where the context continues, forked where it does not, never re-tokenised."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.errors import RolloutError
from rlhf.rollout import FinishReason, Rollout, Turn

EOS = 99

# name: (turns as (prompt, response), expected rows as (prompt, response, mask with 1 for sampled))
MERGED: dict[str, tuple[list[tuple[list[int], list[int]]], list[tuple[list[int], list[int], str]]]] = {
    "a single turn is one row": (
        [([1, 2], [3, 4])],
        [([1, 2], [3, 4], "11")],
    ),
    "tool output between two turns is kept and masked": (
        [([1, 2], [3, 4]), ([1, 2, 3, 4, 7, 8], [5])],
        [([1, 2], [3, 4, 7, 8, 5], "11001")],
    ),
    "generation that goes on without anything in between has no masked token": (
        [([1], [2, 3]), ([1, 2, 3], [4, 5])],
        [([1], [2, 3, 4, 5], "1111")],
    ),
    "three turns with two tool outputs": (
        [([1], [2]), ([1, 2, 7], [3]), ([1, 2, 7, 3, 8, 8], [4])],
        [([1], [2, 7, 3, 8, 8, 4], "101001")],
    ),
    "tool output longer than all responses together": (
        [([1], [2]), ([1, 2, 7, 7, 7, 7, 7, 7], [3])],
        [([1], [2, 7, 7, 7, 7, 7, 7, 3], "10000001")],
    ),
    "an end token inside tool output stays masked": (
        [([1], [2, EOS]), ([1, 2, EOS, 7, EOS, 6], [3, EOS])],
        [([1], [2, EOS, 7, EOS, 6, 3, EOS], "1100011")],
    ),
    "tool output equal to what was sampled is told apart by position": (
        [([1], [5, 5]), ([1, 5, 5, 5, 5], [5, 5])],
        [([1], [5, 5, 5, 5, 5, 5], "110011")],
    ),
    "a single newline that the template adds after the end token": (
        [([1], [2, EOS]), ([1, 2, EOS, 10], [3, EOS])],
        [([1], [2, EOS, 10, 3, EOS], "11011")],
    ),
    "turns that sample the end token only": (
        [([1], [EOS]), ([1, EOS, 7], [EOS])],
        [([1], [EOS, 7, EOS], "101")],
    ),
    "a response cut off without an end token and continued after a nudge": (
        [([1], [2, 2, 2]), ([1, 2, 2, 2, 40], [3, EOS])],
        [([1], [2, 2, 2, 40, 3, EOS], "111011")],
    ),
    "one id over and over: only the counts tell prompt, response and tool apart": (
        [([1, 1], [1]), ([1, 1, 1, 1], [1, 1])],
        [([1, 1], [1, 1, 1, 1], "1011")],
    ),
    "tool, then no tool, then tool": (
        [([1], [2]), ([1, 2, 7], [3]), ([1, 2, 7, 3], [4]), ([1, 2, 7, 3, 4, 8], [5])],
        [([1], [2, 7, 3, 4, 8, 5], "101101")],
    ),
    "id 0 is a token like any other": (
        [([0], [0]), ([0, 0, 0], [0])],
        [([0], [0, 0, 0], "101")],
    ),
    "ten turns stay one row": (
        [([1] + [2, 7] * t, [2]) for t in range(10)],
        [([1], [2, 7] * 9 + [2], "10" * 9 + "1")],
    ),
}

FORKED: dict[str, tuple[list[tuple[list[int], list[int]]], list[tuple[list[int], list[int], str]]]] = {
    "a template drops earlier thoughts": (
        [([1], [50, 51, 2, EOS]), ([1, 2, EOS, 7], [3])],
        [([1], [50, 51, 2, EOS], "1111"), ([1, 2, EOS, 7], [3], "1")],
    ),
    "a template re-tokenises: two ids became one": (
        [([1], [30, 31]), ([1, 32, 7], [3])],
        [([1], [30, 31], "11"), ([1, 32, 7], [3], "1")],
    ),
    "a template re-tokenises: one id became two": (
        [([1], [32]), ([1, 30, 31, 7], [3])],
        [([1], [32], "1"), ([1, 30, 31, 7], [3], "1")],
    ),
    "the oldest tokens slid out of the window": (
        [([1, 2, 3], [4]), ([3, 4, 7], [5])],
        [([1, 2, 3], [4], "1"), ([3, 4, 7], [5], "1")],
    ),
    "a retry from the same prompt": (
        [([1, 2], [3]), ([1, 2], [4])],
        [([1, 2], [3], "1"), ([1, 2], [4], "1")],
    ),
    "a retry that says the same is still a row of its own": (
        [([1, 2], [3]), ([1, 2], [3])],
        [([1, 2], [3], "1"), ([1, 2], [3], "1")],
    ),
    "a prompt that ends inside the last response": (
        [([1], [2, 3, 4]), ([1, 2, 3], [5])],
        [([1], [2, 3, 4], "111"), ([1, 2, 3], [5], "1")],
    ),
    "the template strips the end token": (
        [([1], [2, EOS]), ([1, 2, 7], [3])],
        [([1], [2, EOS], "11"), ([1, 2, 7], [3], "1")],
    ),
    "the template writes another end token than was sampled": (
        [([1], [2, EOS]), ([1, 2, 98, 7], [3])],
        [([1], [2, EOS], "11"), ([1, 2, 98, 7], [3], "1")],
    ),
    "a second beginning-of-sequence token appears": (
        [([1, 5], [2]), ([1, 1, 5, 2, 7], [3])],
        [([1, 5], [2], "1"), ([1, 1, 5, 2, 7], [3], "1")],
    ),
    "the system prompt was edited": (
        [([1, 60, 5], [2]), ([1, 61, 5, 2, 7], [3])],
        [([1, 60, 5], [2], "1"), ([1, 61, 5, 2, 7], [3], "1")],
    ),
    "the history was replaced by a summary": (
        [([1, 2, 3, 4, 5, 6], [7]), ([80], [8])],
        [([1, 2, 3, 4, 5, 6], [7], "1"), ([80], [8], "1")],
    ),
    "a message was put in before the response": (
        [([1, 5], [2]), ([1, 5, 70, 2, 7], [3])],
        [([1, 5], [2], "1"), ([1, 5, 70, 2, 7], [3], "1")],
    ),
    "the next prompt begins with the response alone": (
        [([5], [6]), ([6, 7], [8])],
        [([5], [6], "1"), ([6, 7], [8], "1")],
    ),
    "after a fork turns merge with the new context": (
        [([1], [50, 2]), ([1, 2, 7], [51, 3]), ([1, 2, 7, 51, 3, 8], [4])],
        [([1], [50, 2], "11"), ([1, 2, 7], [51, 3, 8, 4], "1101")],
    ),
    "a fork after a merge takes the rewritten context as its prompt": (
        [([1], [2]), ([1, 2, 7], [3]), ([1, 7, 3, 8], [4])],
        [([1], [2, 7, 3], "101"), ([1, 7, 3, 8], [4], "1")],
    ),
    "merged tool output was reformatted later": (
        [([1], [2]), ([1, 2, 7, 7], [3]), ([1, 2, 7, 3, 8], [4])],
        [([1], [2, 7, 7, 3], "1001"), ([1, 2, 7, 3, 8], [4], "1")],
    ),
    "every turn forks": (
        [([1], [2]), ([9, 1], [3]), ([9, 9, 1], [4])],
        [([1], [2], "1"), ([9, 1], [3], "1"), ([9, 9, 1], [4], "1")],
    ),
    "two agents that alternate: only the last context is compared": (
        [([1], [2]), ([5], [6]), ([1, 2, 7], [3]), ([5, 6, 7], [8])],
        [([1], [2], "1"), ([5], [6], "1"), ([1, 2, 7], [3], "1"), ([5, 6, 7], [8], "1")],
    ),
    "a sub-agent is called and the caller goes on": (
        [([1], [2]), ([40], [41]), ([40, 41, 7], [42]), ([1, 2, 42], [3])],
        [([1], [2], "1"), ([40], [41, 7, 42], "101"), ([1, 2, 42], [3], "1")],
    ),
    "going back to the first prompt after two merged turns": (
        [([1], [2]), ([1, 2, 7], [3]), ([1], [4])],
        [([1], [2, 7, 3], "101"), ([1], [4], "1")],
    ),
    "thoughts dropped at each of three turns": (
        [([1], [50, 2]), ([1, 2, 7], [51, 3]), ([1, 2, 7, 3, 8], [52, 4])],
        [([1], [50, 2], "11"), ([1, 2, 7], [51, 3], "11"), ([1, 2, 7, 3, 8], [52, 4], "11")],
    ),
}

EMPTY: dict[str, tuple[list[tuple[list[int], list[int]]], list[tuple[list[int], list[int], str]]]] = {
    "an episode that sampled nothing is one row of length 0": (
        [([1, 2], [])],
        [([1, 2], [], "")],
    ),
    "two turns that sampled nothing keep the first prompt": (
        [([1, 2], []), ([1, 2, 7], [])],
        [([1, 2], [], "")],
    ),
    "nothing, then something: the row begins with the prompt that was answered": (
        [([1], []), ([1, 7], [2])],
        [([1, 7], [2], "1")],
    ),
    "nothing in the middle: both tool outputs are merged": (
        [([1], [2]), ([1, 2, 7], []), ([1, 2, 7, 8], [3])],
        [([1], [2, 7, 8, 3], "1001")],
    ),
    "nothing at the end: no tool output is left dangling": (
        [([1], [2]), ([1, 2, 7], [])],
        [([1], [2], "1")],
    ),
    "nothing from another context does not part turns that continue": (
        [([1], [2]), ([40], []), ([1, 2, 7], [3])],
        [([1], [2, 7, 3], "101")],
    ),
    "nothing, then a fork": (
        [([1], [2]), ([1, 2, 7], []), ([9], [3])],
        [([1], [2], "1"), ([9], [3], "1")],
    ),
}


def _episode(turns: list[tuple[list[int], list[int]]]) -> list[Turn]:
    """Log-probabilities that tell which turn and token they belong to."""
    return [Turn(prompt, response, [-(t + 1) - i / 64 for i in range(len(response))]) for t, (prompt, response) in enumerate(turns)]


def _rows(rollout: Rollout) -> list[tuple[list[int], list[int], str]]:
    result = []
    for prompt, ids, mask, length in zip(rollout.prompt_ids, rollout.response_ids, rollout.response_mask, rollout.lengths, strict=True):
        assert not mask[length:].any()
        result.append((prompt.tolist(), ids[:length].tolist(), "".join(str(int(bit)) for bit in mask[:length])))
    return result


@pytest.mark.parametrize("name", [*MERGED, *FORKED, *EMPTY])
def test_turns_become_exactly_these_rows(name: str) -> None:
    turns, expected = (MERGED | FORKED | EMPTY)[name]
    episode = _episode(turns)
    rollout = Rollout.from_turns([episode])
    assert _rows(rollout) == expected
    assert rollout.episode.tolist() == [0] * len(expected)
    assert rollout.group.tolist() == [0] * len(expected)
    # Every sampled token appears once, in order, beside its own log-probability; all else has 0.
    assert rollout.logprobs is not None
    sampled = [value for turn in episode for value in turn.logprobs or []]
    assert rollout.logprobs[rollout.response_mask].tolist() == sampled
    assert not rollout.logprobs[~rollout.response_mask].any()


def test_any_episode_is_kept_token_for_token() -> None:
    draw = random.Random(0)
    for _ in range(200):
        turns: list[Turn] = []
        context: list[int] = []
        for _ in range(draw.randint(1, 5)):
            between = [draw.randint(0, 2) for _ in range(draw.randint(0, 3))]
            continues = bool(context) and draw.random() < 0.6
            prompt = context + between if continues else [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]
            response = [draw.randint(0, 2) for _ in range(draw.randint(1, 4))]
            turns.append(Turn(prompt, response, [-draw.random() for _ in response]))
            context = prompt + response
        rollout = Rollout.from_turns([turns])
        whole = [prompt + ids for prompt, ids, _ in _rows(rollout)]
        row, context = -1, []
        for turn in turns:
            prompt, response = list(turn.prompt_ids), list(turn.response_ids)
            row += not context or prompt[: len(context)] != context
            context = prompt + response
            assert whole[row][: len(context)] == context
            first = len(prompt) - len(rollout.prompt_ids[row])
            assert rollout.response_mask[row, first : first + len(response)].all()
        assert row == len(rollout) - 1
        assert int(rollout.response_mask.sum()) == sum(len(turn.response_ids) for turn in turns)


@pytest.mark.parametrize(
    "turn",
    [
        Turn([1, 2], [3, 4], [-0.5, -0.25], 6, 1.5),
        ([1, 2], [3, 4], [-0.5, -0.25], 6, 1.5),
        [[1, 2], [3, 4], [-0.5, -0.25], 6, 1.5],
        {"prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -0.25], "weight_version": 6, "reward": 1.5},
        (torch.tensor([1, 2]), torch.tensor([3, 4], dtype=torch.int32), torch.tensor([-0.5, -0.25]), 6, 1.5),
        (np.array([1, 2]), np.array([3, 4]), np.array([-0.5, -0.25]), 6, 1.5),
        ((1, 2), (3, 4), (-0.5, -0.25), 6, 1.5),
    ],
    ids=["Turn", "tuple", "list", "dict", "tensors", "arrays", "tuples of ids"],
)
def test_a_turn_may_be_written_in_any_of_these_forms(turn: Any) -> None:
    rollout = Rollout.from_turns([[turn]])
    assert _rows(rollout) == [([1, 2], [3, 4], "11")]
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [[-0.5, -0.25]]
    assert rollout.weight_version.tolist() == [6]
    assert rollout.extras["env_reward"].tolist() == [1.5]


def test_a_tuple_without_a_reward_has_none() -> None:
    rollout = Rollout.from_turns([[([1], [2], [-0.5], 3)]])
    assert "env_reward" not in rollout.extras
    assert rollout.weight_version.tolist() == [3]


ONE = [([1], [2])]
TWO_ROWS = [([1], [2]), ([9], [3])]


@pytest.mark.parametrize(
    "episodes, group, expected_episode, expected_group",
    [
        ([ONE, ONE], None, [0, 1], [0, 1]),
        ([ONE, ONE], [0, 0], [0, 1], [0, 0]),
        ([ONE, TWO_ROWS, ONE], None, [0, 1, 1, 2], [0, 1, 1, 2]),
        ([TWO_ROWS, TWO_ROWS], [0, 0], [0, 0, 1, 1], [0, 0, 0, 0]),
        ([TWO_ROWS, ONE, ONE, TWO_ROWS], [0, 0, 1, 1], [0, 0, 1, 2, 3, 3], [0, 0, 0, 1, 1, 1]),
        ([ONE, ONE], torch.tensor([41, 7]), [0, 1], [41, 7]),
        ([ONE, TWO_ROWS, ONE], [5, 3, 5], [0, 1, 1, 2], [5, 3, 3, 5]),
        ([], None, [], []),
    ],
    ids=[
        "episodes are groups of their own by default",
        "two samples of one prompt",
        "only the middle one forks",
        "both samples of one prompt fork",
        "two groups, a fork in each",
        "ids are kept as given",
        "samples of one prompt need not be neighbours",
        "no episodes",
    ],
)
def test_rows_of_one_episode_share_episode_and_group(
    episodes: Any, group: Any, expected_episode: list[int], expected_group: list[int]
) -> None:
    rollout = Rollout.from_turns([_episode(turns) for turns in episodes], group=group)
    assert rollout.episode.tolist() == expected_episode
    assert rollout.group.tolist() == expected_group


def test_equal_turns_of_two_episodes_are_not_merged() -> None:
    rollout = Rollout.from_turns([[Turn([1], [2])], [Turn([1, 2, 7], [3])]])
    assert _rows(rollout) == [([1], [2], "1"), ([1, 2, 7], [3], "1")]
    assert rollout.episode.tolist() == [0, 1]


def test_what_is_given_per_episode_reaches_each_of_its_rows() -> None:
    rollout = Rollout.from_turns(
        [_episode(TWO_ROWS), _episode(ONE)],
        rows=[{"ground_truth": "a"}, {"ground_truth": "b"}],
        temperature=[0.5, 1.0],
        filtered=[True, False],
        extras={"judge": ["x", "y"], "level": torch.tensor([[1.0], [2.0]])},
    )
    assert [row["ground_truth"] for row in rollout.rows] == ["a", "a", "b"]
    assert rollout.temperature.tolist() == [0.5, 0.5, 1.0]
    assert rollout.filtered.tolist() == [True, True, False]
    assert rollout.extras["judge"] == ["x", "x", "y"]
    assert rollout.extras["level"].tolist() == [[1.0], [1.0], [2.0]]


def test_the_number_of_turns_in_each_row_is_kept() -> None:
    turns = [([1], [2]), ([1, 2, 7], [3]), ([1, 2, 7, 3, 8], []), ([9], [4])]
    assert Rollout.from_turns([_episode(turns)]).extras["turns"].tolist() == [2, 1]


@pytest.mark.parametrize(
    "turns, oldest, newest",
    [
        ([([1], [2], 4), ([1, 2, 7], [3], 4)], [4], [4]),
        ([([1], [2], 3), ([1, 2, 7], [3], 4)], [3], [4]),
        ([([1], [2], 7), ([1, 2], [3], 5), ([1, 2, 3], [4], 6)], [5], [7]),
        ([([1], [2], 3), ([9], [3], 4)], [3, 4], [3, 4]),
        ([([1], [2], 3), ([1, 2, 7], [3], 4), ([9], [4], 5)], [3, 5], [4, 5]),
        ([([1], [2], 4), ([1, 2, 7], [], 3)], [4], [4]),
        ([([1], [], 6), ([1, 7], [], 5)], [5], [6]),
        ([([1], [2], -1), ([1, 2, 7], [3], 2)], [-1], [2]),
    ],
    ids=[
        "one version throughout",
        "weights changed between two merged turns",
        "the oldest is in the middle",
        "each row of a fork has its own",
        "a merged row, then a fork",
        "a turn without tokens has no say",
        "unless there are no others",
        "unknown counts as oldest",
    ],
)
def test_a_row_is_as_old_as_the_oldest_of_its_turns(turns: Any, oldest: list[int], newest: list[int]) -> None:
    rollout = Rollout.from_turns([[Turn(prompt, response, weight_version=version) for prompt, response, version in turns]])
    assert rollout.weight_version.tolist() == oldest
    assert rollout.extras["weight_version_max"].tolist() == newest


@pytest.mark.parametrize(
    "versions, fraction",
    [
        ([[3], [3], [2]], 1 / 3),
        ([[3], [3], [3]], 0.0),
        ([[2, 3], [3]], 0.5),
        ([[2, 3], [2, 3]], 1.0),
        ([[-1], [-1]], 0.0),
        ([[-1], [3]], 0.5),
        ([[1], [2], [3], [4]], 0.75),
        ([[5, 5], [5]], 0.0),
    ],
    ids=[
        "one of three is older",
        "all alike",
        "one row is mixed",
        "all rows are mixed",
        "all unknown",
        "some unknown",
        "all differ",
        "merged, alike",
    ],
)
def test_rows_with_tokens_of_older_weights_show_in_a_metric(versions: list[list[int]], fraction: float) -> None:
    episodes = [[Turn([1] + [2] * t, [2], weight_version=version) for t, version in enumerate(row)] for row in versions]
    assert Rollout.from_turns(episodes).metrics()["rollout/mixed_version_fraction"] == pytest.approx(fraction, abs=1e-12)


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([[0.25, 0.5]], [0.75]),
        ([[None, 1.0]], [1.0]),
        ([[1.0, -1.0]], [0.0]),
        ([[0.0]], [0.0]),
        ([[0.1] * 10], [1.0]),
        ([[1.0], [None]], [1.0, math.nan]),
        ([[None, None], [2.0], [0.5, 0.5]], [math.nan, 2.0, 1.0]),
    ],
    ids=["summed", "none counts as nothing", "may cancel", "0 is a reward", "summed exactly", "unknown is NaN, not 0", "three episodes"],
)
def test_the_rewards_of_an_episode_are_summed(rewards: list[list[float | None]], expected: list[float]) -> None:
    episodes = [[Turn([1] + [2] * t, [2], reward=reward) for t, reward in enumerate(row)] for row in rewards]
    got = Rollout.from_turns(episodes).extras["env_reward"]
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_all_rows_of_an_episode_carry_its_whole_reward() -> None:
    forked = [Turn([1], [2], reward=0.25), Turn([9], [3], reward=0.5), Turn([9, 3, 7], [], reward=0.125)]
    rollout = Rollout.from_turns([forked, [Turn([1], [4], reward=3.0)]])
    assert rollout.extras["env_reward"].tolist() == [0.875, 0.875, 3.0]


@pytest.mark.parametrize(
    "turns, episode_reason, expected, truncated",
    [
        ([([1], [2], "stop")], None, ["stop"], [False]),
        ([([1], [2], "length")], None, ["length"], [True]),
        ([([1], [2], "length"), ([1, 2, 7], [3], "stop")], None, ["stop"], [False]),
        ([([1], [2], "stop"), ([1, 2, 7], [3], "length")], None, ["length"], [True]),
        ([([1], [2], "stop"), ([9], [3], "length")], None, ["stop", "length"], [False, True]),
        ([([1], [2], "stop"), ([9], [3], "stop")], "max_turns", ["stop", "max_turns"], [False, True]),
        ([([1], [2], "length"), ([9], [3], "stop")], "max_turns", ["length", "max_turns"], [True, True]),
        ([([1], [2], "stop"), ([1, 2, 7], [], "abort")], None, ["abort"], [False]),
        ([([1], [], "error")], None, ["error"], [False]),
        ([([1], [2], "length")], "error", ["error"], [False]),
    ],
    ids=[
        "stopped",
        "cut",
        "cut, then continued and stopped",
        "the last turn of a row decides",
        "each row of a fork has its own",
        "out of turns: the last row says so",
        "and an earlier row keeps its own",
        "aborted before the first token",
        "an episode that only failed",
        "the episode's reason takes precedence",
    ],
)
def test_a_row_ends_as_its_last_turn_or_its_episode_did(
    turns: Any, episode_reason: str | None, expected: list[str], truncated: list[bool]
) -> None:
    episode = [Turn(prompt, response, finish_reason=reason) for prompt, response, reason in turns]
    rollout = Rollout.from_turns([episode], finish_reasons=[episode_reason])
    assert rollout.finish_reasons == [FinishReason(reason) for reason in expected]
    assert rollout.truncated.tolist() == truncated


def test_turns_without_log_probabilities_give_a_rollout_without() -> None:
    assert Rollout.from_turns([[Turn([1], [2]), Turn([1, 2, 7], [3])]]).logprobs is None


def test_a_turn_that_sampled_nothing_needs_no_log_probabilities() -> None:
    rollout = Rollout.from_turns([[Turn([1], [2], [-0.5]), Turn([1, 2, 7], [], None)]])
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [[-0.5]]


def test_ids_that_decoding_and_encoding_would_change_are_kept_through_a_second_turn(bpe: Any) -> None:
    letters = [bpe.convert_tokens_to_ids(letter) for letter in "hello"]
    assert bpe.decode(letters) == "hello"
    assert len(bpe("hello").input_ids) < len(letters)  # the tokenizer would write the word in fewer ids
    prompt = bpe("the").input_ids
    tool = bpe(" world").input_ids
    rollout = Rollout.from_turns([[Turn(prompt, letters), Turn(prompt + letters + tool, letters)]], tokenizer=bpe)
    assert rollout.response_ids[0].tolist() == letters + tool + letters
    assert rollout.response_mask[0].tolist() == [True] * 5 + [False] * len(tool) + [True] * 5
    assert rollout.texts == ["hello worldhello"]


def test_a_template_that_re_tokenises_what_was_sampled_forks(bpe: Any) -> None:
    question = [{"role": "user", "content": "hello"}]
    prompt = bpe.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    sampled = [bpe.convert_tokens_to_ids(letter) for letter in "hello"] + [bpe.eos_token_id]
    rendered = bpe.apply_chat_template(
        [*question, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "4"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    rollout = Rollout.from_turns([[Turn(prompt, sampled), Turn(rendered, sampled)]], tokenizer=bpe)
    assert [ids.tolist() for ids in rollout.prompt_ids] == [prompt, rendered]
    assert rollout.response_ids.tolist() == [sampled, sampled]
    assert rollout.episode.tolist() == [0, 0]


def test_a_template_that_repeats_the_sampled_ids_merges(bpe: Any) -> None:
    question = [{"role": "user", "content": "hello"}]
    prompt = bpe.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    sampled = [*bpe("the answer is 4").input_ids, bpe.eos_token_id]
    chat = [*question, {"role": "assistant", "content": "the answer is 4"}, {"role": "user", "content": "world"}]
    following = bpe.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    rollout = Rollout.from_turns([[Turn(prompt, sampled), Turn(following, sampled)]], tokenizer=bpe)
    assert len(rollout) == 1
    between = len(following) - len(prompt) - len(sampled)
    assert rollout.response_mask[0].tolist() == [True] * len(sampled) + [False] * between + [True] * len(sampled)
    assert rollout.texts[0] == "the answer is 4\nuser\nworld\nassistant\nthe answer is 4"
    assert rollout.raw_texts[0].startswith("the answer is 4<|im_end|>\n<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\n")


def test_a_reasoning_template_that_forgets_thoughts_forks_and_trains_the_thoughts_once(forgetful: Any) -> None:
    question = [{"role": "user", "content": "hello"}]
    prompt = forgetful.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    thought = [*forgetful("<think>world</think>4").input_ids, forgetful.eos_token_id]
    chat = [*question, {"role": "assistant", "content": "<think>world</think>4"}, {"role": "user", "content": "the"}]
    following = forgetful.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert "world" not in forgetful.decode(following)
    rollout = Rollout.from_turns([[Turn(prompt, thought, reward=1.0), Turn(following, thought)]], tokenizer=forgetful)
    assert [ids.tolist() for ids in rollout.prompt_ids] == [prompt, following]
    assert rollout.response_mask.all()
    assert rollout.extras["env_reward"].tolist() == [1.0, 1.0]


def test_a_completion_that_closes_a_think_tag_opened_by_the_prompt_is_not_rendered_again(bpe: Any) -> None:
    prompt = bpe("2+2=<think>\n").input_ids
    completion = bpe("2+2=4.\n</think>\n\nThe answer is 4.").input_ids
    rollout = Rollout.from_turns([[Turn(prompt, completion)]], tokenizer=bpe)
    assert torch.cat([rollout.prompt_ids[0], rollout.response_ids[0]]).tolist() == prompt + completion
    assert rollout.texts == ["2+2=4.\n</think>\n\nThe answer is 4."]


@pytest.mark.parametrize(
    "episodes, options, message",
    [
        ([[]], {}, r"episodes\[0\] must have at least one turn"),
        ([[Turn([1], [2])], []], {}, r"episodes\[1\] must have at least one turn"),
        ([[Turn([], [2])]], {}, r"episodes\[0\]\[0\]\.prompt_ids must have at least one token"),
        ([[Turn([1], [2, 3, 4, 5, 6], [-1.0] * 4)]], {}, r"episodes\[0\]\[0\]\.logprobs must have 5 entries.*got 4"),
        ([[Turn([1], [2] * 120, [-1.0] * 121)]], {}, r"must have 120 entries.*got 121"),
        (
            [[Turn([1], [2], [-1.0]), Turn([1, 2], [3])]],
            {},
            r"for all turns or for none, got them at episodes\[0\]\[0\] but not at episodes\[0\]\[1\]",
        ),
        ([[Turn([1], [2])], [Turn([1], [2], [-1.0])]], {}, r"got them at episodes\[1\]\[0\] but not at episodes\[0\]\[0\]"),
        ([[Turn([1], [2], [math.nan])]], {}, "logprobs must be finite where response_mask is True, got nan at row 0, token 0"),
        ([[([1], [2], [-1.0])]], {}, "got 3 entries"),
        ([[([1], [2], [-1.0], 0.5)]], {}, r"weight_version must be an int \(-1 if unknown\), got 0.5; the reward comes after it"),
        ([[{"prompt_ids": [1], "response_ids": [2], "version": 3}]], {}, "keys prompt_ids and response_ids, and none but"),
        ([[{"prompt_ids": [1]}]], {}, "keys prompt_ids and response_ids"),
        ([["hello"]], {}, "must be a Turn, a tuple or a dict, got str"),
        ([[Turn("text", [2])]], {}, r"episodes\[0\]\[0\]\.prompt_ids must be token ids, got text"),
        ([[Turn([1], [0.5])]], {}, r"response_ids must be a flat list of integer token ids, got float32"),
        ([[Turn([1], [[2], [3]])]], {}, "flat list of integer token ids"),
        ([[Turn([1], [2], [[-1.0]])]], {}, "flat list"),
        ([[Turn([1], [2], reward=math.inf)]], {}, "reward must be finite, got inf"),
        ([[Turn([1], [2], reward="high")]], {}, "reward must be a number, got 'high'"),
        ([Turn([1], [2])], {}, r"episodes\[0\] must be a list of turns, got Turn; put the turns of an episode in a list"),
        (None, {}, "episodes must be a list of lists of turns, got NoneType"),
        ([[Turn([1], [2], finish_reason="eos")]], {}, "finish reason must be among.*got 'eos'"),
        ([[Turn([1], [2])]], {"group": [0, 1]}, "group must have one entry for each of the 1 episodes, got 2"),
        ([[Turn([1], [2])]], {"rows": []}, "rows must have one entry for each of the 1 episodes, got 0"),
        ([[Turn([1], [2])]], {"finish_reasons": "max_turns"}, "finish_reasons must be a flat list"),
        ([[Turn([1], [2])]], {"temperature": [1.0, 1.0]}, "temperature must have one entry"),
        ([[Turn([1], [2])]], {"extras": {"x": [1, 2]}}, r"extras\['x'\] must have one entry for each of the 1 episodes, got 2"),
        ([[Turn([1], [2])]], {"extras": {"turns": [1]}}, "keys that from_turns sets itself, got turns"),
    ],
)
def test_bad_turns_are_named(episodes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        Rollout.from_turns(episodes, **options)
    assert isinstance(caught.value, ValueError)

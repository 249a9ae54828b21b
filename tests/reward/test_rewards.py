"""The Rewards record: what it refuses, how it is cut and joined, and its metrics by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.errors import RewardError, ShapeError
from rlhf.reward import Fault, Rewards, Status

NAN = math.nan
OK, ABSTAIN, TIMEOUT, ERROR = Status


def four() -> Rewards:
    return Rewards(
        scores=torch.tensor([1.0, NAN, 0.0, NAN]),
        status=[OK, ERROR, OK, TIMEOUT],
        parts={"A": torch.tensor([1.0, NAN, 0.0, 4.0])},
        token_scores=torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]),
        faults=[None, Fault(ERROR, "broke"), None, Fault(TIMEOUT, "slow")],
        logged={"n": [1, None, 3, True], "word": ["a", "b", None, None]},
    )


@pytest.mark.parametrize(("score", "status"), [(NAN, OK), (0.0, ERROR), (0.0, ABSTAIN), (1.0, TIMEOUT)])
def test_a_score_is_nan_exactly_where_status_is_not_ok(score, status):
    with pytest.raises(RewardError, match="NaN exactly where status is not OK; row 1 is "):
        Rewards(torch.tensor([1.0, score]), [OK, status])


def test_scores_of_another_shape_or_dtype_are_refused():
    with pytest.raises(ShapeError, match=r"scores must be float32 of shape \[2\]"):
        Rewards(torch.tensor([1.0]), [OK, OK])
    with pytest.raises(ShapeError, match=r"got torch\.float64"):
        Rewards(torch.tensor([1.0], dtype=torch.float64), [OK])
    with pytest.raises(ShapeError, match=r"parts\['A'\] must be float32 of shape \[1\]"):
        Rewards(torch.tensor([1.0]), [OK], {"A": torch.zeros(2)})
    with pytest.raises(ShapeError, match=r"token_scores must be float32 of shape \[1, T\]"):
        Rewards(torch.tensor([1.0]), [OK], {}, torch.zeros(1))


def test_infinite_scores_are_refused_everywhere():
    with pytest.raises(RewardError, match="scores must be finite"):
        Rewards(torch.tensor([math.inf]), [OK])
    with pytest.raises(RewardError, match=r"parts\['A'\] must be finite"):
        Rewards(torch.tensor([1.0]), [OK], {"A": torch.tensor([-math.inf])})
    with pytest.raises(RewardError, match="token_scores must be finite"):
        Rewards(torch.tensor([1.0]), [OK], {}, torch.tensor([[NAN]]))


def test_every_list_has_one_entry_a_row():
    with pytest.raises(RewardError, match="faults must have one entry for each of the 1 rows, got 2"):
        Rewards(torch.tensor([1.0]), [OK], faults=[None, None])
    with pytest.raises(RewardError, match=r"logged\['x'\] must have one entry for each of the 1 rows, got 0"):
        Rewards(torch.tensor([1.0]), [OK], logged={"x": []})
    with pytest.raises(RewardError, match="episode must have one entry"):
        Rewards(torch.tensor([1.0]), [OK], episode=torch.zeros(2))


@pytest.mark.parametrize("indices", [[2, 1], torch.tensor([2, 1]), slice(2, 0, -1), [-2, -3]])
def test_select_takes_rows_in_the_order_asked_for(indices):
    part = four().select(indices)
    assert part.scores[0] == 0.0
    assert part.status == [OK, ERROR]
    assert part.parts["A"][0] == 0.0
    assert part.token_scores.tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    assert part.errors == [None, "broke"]
    assert part.logged == {"n": [3, None], "word": [None, "b"]}


def test_select_takes_a_mask_and_an_empty_list():
    assert four().select([True, False, False, True]).status == [OK, TIMEOUT]
    assert len(four().select([])) == 0


def test_concat_fills_what_a_batch_lacks_and_renumbers_episodes():
    left = four()
    left.episode = torch.tensor([5, 5, 6, 6])
    right = Rewards(torch.tensor([2.0]), [OK], {"B": torch.tensor([2.0])}, torch.tensor([[1.0, 0.5, 0.5]]), episode=torch.tensor([5]))
    both = Rewards.concat([left, right])
    assert both.status == [OK, ERROR, OK, TIMEOUT, OK]
    assert both.scores[4] == 2.0
    assert both.parts["A"].isnan().tolist() == [False, True, False, False, True]
    assert both.parts["B"].isnan().tolist() == [True, True, True, True, False]
    assert both.token_scores.shape == (5, 3)
    assert both.token_scores[2].tolist() == [-1.0, 1.0, 0.0]
    assert both.logged["n"] == [1, None, 3, True, None]
    assert both.episode.tolist() == [0, 0, 1, 1, 2]
    assert both.errors == [None, "broke", None, "slow", None]


def test_concat_refuses_token_scores_in_some_batches_only():
    whole = Rewards(torch.tensor([2.0]), [OK])
    with pytest.raises(RewardError, match="token_scores in some batches only"):
        Rewards.concat([four(), whole])
    failed = Rewards(torch.tensor([NAN]), [ERROR])
    assert Rewards.concat([four(), failed]).token_scores.shape == (5, 2)
    with pytest.raises(RewardError, match="at least one"):
        Rewards.concat([])


def test_metrics_by_hand():
    metrics = four().metrics()
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/error_rate": 0.25,
        "reward/timeout_rate": 0.25,
        "reward/abstain_rate": 0.0,
        "reward/part/A": pytest.approx(5 / 3, abs=1e-12),
        "reward/log/n": pytest.approx(5 / 3, abs=1e-12),
    }
    assert all(type(value) is float for value in metrics.values())


def test_metrics_count_an_episode_once():
    rewards = Rewards(torch.tensor([1.0, 1.0, 1.0, 0.0]), [OK] * 4, episode=torch.tensor([0, 0, 0, 1]))
    assert rewards.metrics()["reward/mean"] == 0.5
    failed = Rewards(torch.tensor([NAN, NAN, NAN, 0.0]), [ERROR] * 3 + [OK], episode=torch.tensor([0, 0, 0, 1]))
    assert failed.metrics()["reward/error_rate"] == 0.5


def test_metrics_without_a_score_are_nan_and_rates_stay():
    metrics = Rewards(torch.tensor([NAN]), [ERROR]).metrics()
    assert math.isnan(metrics["reward/mean"])
    assert math.isnan(metrics["reward/max"])
    assert metrics["reward/error_rate"] == 1.0
    assert Rewards(torch.zeros(0), []).metrics()["reward/error_rate"] == 0.0


def test_repr_is_one_line():
    assert repr(four()) == "Rewards(4 rows: mean 0.5, std 0.5; 2 OK, 1 TIMEOUT, 1 ERROR)"
    assert repr(Rewards(torch.zeros(0), [])) == "Rewards(0 rows: no scores; empty)"

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf.data import AdaptiveSampler, PromptDataset, PromptLoader
from rlhf.errors import ConfigError, DataError, RLHFWarning
from tests.data.conftest import character_tokenizer


def numbers(count: int) -> PromptDataset:
    return PromptDataset([{"prompt": str(i), "uid": str(i)} for i in range(count)], character_tokenizer())


def uids(batch) -> list[int]:
    return [int(prompt.row["uid"]) for prompt in batch]


def drain(loader) -> list[list[int]]:
    return [uids(batch) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [uid for batch in batches for uid in batch]


def through_json(state):
    return json.loads(json.dumps(state))


# Order


def test_an_epoch_hands_out_every_row_once_in_an_order_of_its_own():
    batches = drain(numbers(12).loader(4, seed=3, epochs=2))
    first, second = flat(batches[:3]), flat(batches[3:])
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != list(range(12))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    data = numbers(12)
    torch.manual_seed(1)
    one = drain(data.loader(4, seed=3, epochs=2))
    torch.manual_seed(2)
    np.random.seed(3)
    random.seed(4)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert drain(data.loader(4, seed=3, epochs=2)) == one
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert drain(data.loader(4, seed=4, epochs=2)) != one


def test_neighbouring_seeds_and_epochs_do_not_share_orders():
    data = numbers(12)
    orders = [tuple(batch) for seed in range(4) for batch in drain(data.loader(12, seed=seed, epochs=4))]
    assert len(set(orders)) == 16


def test_the_order_never_changes_between_versions():
    assert drain(numbers(8).loader(4, seed=0)) == [[2, 4, 3, 6], [5, 0, 1, 7]]


def test_without_shuffle_rows_come_as_they_are():
    assert drain(numbers(5).loader(2, shuffle=False, drop_last=False, epochs=2)) == [[0, 1], [2, 3], [4]] * 2


@pytest.mark.parametrize("drop_last, batches, last", [(True, 2, 4), (False, 3, 2)])
def test_ten_rows_in_batches_of_four(drop_last, batches, last):
    loader = numbers(10).loader(4, drop_last=drop_last)
    assert len(loader) == batches
    drained = drain(loader)
    assert [len(batch) for batch in drained] == [4] * (batches - 1) + [last]
    assert len(set(flat(drained))) == 4 * (batches - 1) + last


def test_a_dataset_smaller_than_a_batch_is_refused_or_makes_one_short_batch():
    with pytest.raises(
        DataError, match="3 rows do not fill a batch of prompts_per_step=4; lower it, or take a smaller batch with drop_last=False"
    ):
        numbers(3).loader(4)
    assert [len(batch) for batch in numbers(3).loader(4, drop_last=False, epochs=2)] == [3, 3]


def test_a_loader_without_end_has_no_length_and_goes_on():
    loader = numbers(4).loader(2, epochs=None)
    with pytest.raises(TypeError, match="epochs=None"):
        len(loader)
    seen = [uids(next(loader)) for _ in range(50)]
    assert all(sorted(seen[2 * k] + seen[2 * k + 1]) == [0, 1, 2, 3] for k in range(25))
    assert (loader.epoch, loader.batches, loader.finished) == (25, 50, False)


@pytest.mark.parametrize("epochs, length", [(1, 2), (3, 6)])
def test_the_length_counts_the_batches_of_all_epochs(epochs, length):
    loader = numbers(5).loader(2, epochs=epochs)
    assert len(loader) == length == len(list(loader)) == loader.batches


@pytest.mark.parametrize(
    "options", [{"prompts_per_step": 0}, {"prompts_per_step": 2.0}, {"epochs": 0}, {"epochs": True}, {"seed": -1}, {"seed": None}]
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be a whole number"):
        PromptLoader(numbers(4), **{"prompts_per_step": 2, **options})


# Iterating more than once


def test_a_loop_that_was_left_goes_on_where_it_was():
    whole = drain(numbers(12).loader(2))
    loader = numbers(12).loader(2)
    parts = []
    for batch in loader:
        parts.append(uids(batch))
        if len(parts) == 2:
            break
    assert parts + drain(loader) == whole


def test_a_finished_loader_stays_finished_and_says_so():
    loader = numbers(4).loader(2)
    assert len(list(loader)) == 2
    assert loader.finished
    with pytest.warns(RLHFWarning, match=r"handed out all its batches \(epochs=1\)"):
        assert list(loader) == []
    with pytest.raises(StopIteration):
        next(loader)


# Stop and resume


@pytest.mark.parametrize("drop_last, batches", [(True, 6), (False, 9)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_stopping_after_any_batch_and_resuming_loses_and_repeats_no_row(shuffle, drop_last, batches):
    data = numbers(10)
    options = {"seed": 7, "epochs": 3, "drop_last": drop_last, "shuffle": shuffle}
    whole = drain(data.loader(4, **options))
    assert len(whole) == batches
    for stop in range(batches):
        stopped, resumed = data.loader(4, **options), data.loader(4, **options)
        head = [uids(next(stopped)) for _ in range(stop)]
        resumed.load_state_dict(through_json(stopped.state_dict()))
        assert resumed.batches == stop
        assert head + drain(resumed) == whole


def test_a_state_inside_an_epoch_after_the_first_resumes_that_epochs_order():
    data = numbers(16)
    whole = drain(data.loader(2, epochs=2))
    loader = data.loader(2, epochs=2)
    for _ in range(8 + 3):
        next(loader)
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["batch_in_epoch"], state["batches"]) == (1, 3, 11)
    torch.manual_seed(99)
    resumed = data.loader(2, epochs=2)
    resumed.load_state_dict(state)
    assert drain(resumed) == whole[11:]


def test_a_state_from_the_end_of_an_epoch_starts_the_next_one():
    data = numbers(4)
    loader = data.loader(2, epochs=2)
    next(loader), next(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch_in_epoch"]) == (1, 0)
    resumed = data.loader(2, epochs=2)
    resumed.load_state_dict(state)
    assert len(drain(resumed)) == 2


def test_a_second_resume_goes_on_from_the_first():
    data = numbers(12)
    whole = drain(data.loader(1))
    at_five = data.loader(1)
    for _ in range(5):
        next(at_five)
    once = data.loader(1)
    once.load_state_dict(at_five.state_dict())
    middle = [uids(next(once)) for _ in range(3)]
    twice = data.loader(1)
    twice.load_state_dict(once.state_dict())
    assert middle + drain(twice) == whole[5:]
    assert len(whole[8:]) == 4


def test_a_finished_run_resumes_finished_and_more_epochs_go_on():
    data = numbers(4)
    loader = data.loader(2, epochs=1)
    list(loader)
    state = loader.state_dict()
    same = data.loader(2, epochs=1)
    same.load_state_dict(state)
    assert same.finished
    longer = data.loader(2, epochs=2)
    longer.load_state_dict(state)
    assert drain(longer) == drain(data.loader(2, epochs=2))[2:]


def test_the_place_counts_batches_handed_out_whatever_became_of_them():
    loader = numbers(10).loader(1, epochs=None)
    trained = [k for k in range(150) if next(loader) and k != 2]
    assert len(trained) == 149
    resumed = numbers(10).loader(1, epochs=None)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.batches == 150
    assert uids(next(resumed)) == uids(next(loader))


def test_the_state_is_a_snapshot():
    loader = numbers(8).loader(2)
    next(loader)
    state = loader.state_dict()
    copy = through_json(state)
    next(loader)
    assert state == copy


@pytest.mark.parametrize(
    "other, complaint",
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"prompts_per_step": 3}, "prompts_per_step was 2 and is 3"),
        ({"drop_last": False}, "drop_last was True and is False"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"data": numbers(9)}, "rows was 8 and is 9; fingerprint was"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused_and_changes_nothing(other, complaint):
    saved = numbers(8).loader(2)
    next(saved)
    options = {"data": numbers(8), "prompts_per_step": 2, **other}
    loader = PromptLoader(options.pop("data"), **options)
    with pytest.raises(ConfigError, match=complaint):
        loader.load_state_dict(saved.state_dict())
    assert (loader.epoch, loader.batches) == (0, 0)


def test_something_that_is_no_state_is_refused():
    with pytest.raises(ConfigError, match="not the state of a PromptLoader: it lacks seed"):
        numbers(4).loader(2).load_state_dict({"epoch": 1})


def test_the_loader_shows_where_it_is():
    loader = numbers(4).loader(2, epochs=3)
    next(loader)
    assert repr(loader) == "PromptLoader(2 of 4 prompts a step, 1 batches handed out, epoch 0 of 3)"


# Samplers


class Curriculum:
    """Prefers prompts whose mean reward was neither 0 nor 1: those first, then the untried, then the rest; two batches of 2 an epoch."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}

    def indices(self, dataset, epoch, seed):
        def rank(uid: str) -> int:
            mean = self.means.get(uid)
            return 1 if mean is None else 0 if 0 < mean < 1 else 2

        shuffled = np.random.default_rng([seed, epoch]).permutation(len(dataset))
        return sorted(shuffled, key=lambda index: rank(dataset.uids[index]))[:4]

    def update(self, rollout, rewards):
        scores: dict[str, list[float]] = {}
        for row, score in zip(rollout.rows, rewards.scores.tolist(), strict=True):
            scores.setdefault(row["uid"], []).append(score)
        self.means.update({uid: sum(values) / len(values) for uid, values in scores.items()})

    def state_dict(self):
        return {"means": self.means}

    def load_state_dict(self, state):
        self.means = dict(state["means"])


def work(loader, batch):
    """Two responses to each prompt: uids divisible by 3 are solved once, even ones always, the others never."""
    rows, scores = [], []
    for prompt in batch:
        uid = int(prompt.row["uid"])
        rows += [prompt.row, prompt.row]
        scores += [1.0, 0.0] if uid % 3 == 0 else [float(uid % 2 == 0)] * 2
    loader.update(SimpleNamespace(rows=rows), SimpleNamespace(scores=torch.tensor(scores)))


def run(loader, steps: int) -> list[list[int]]:
    seen = []
    for _ in range(steps):
        batch = next(loader)
        work(loader, batch)
        seen.append(uids(batch))
    return seen


def test_a_curriculum_comes_to_prefer_the_prompts_that_are_neither_solved_nor_hopeless():
    loader = numbers(12).loader(2, epochs=None, sampler=Curriculum())
    assert isinstance(loader.sampler, AdaptiveSampler)
    seen = run(loader, 12)
    assert sorted(flat(seen[-2:])) == [0, 3, 6, 9]


@pytest.mark.parametrize("stop", range(1, 9))
def test_resume_with_a_curriculum_is_exact_also_inside_an_epoch_whose_order_it_would_now_choose_otherwise(stop):
    data = numbers(12)
    whole = run(data.loader(2, seed=5, epochs=None, sampler=Curriculum()), 12)
    stopped = data.loader(2, seed=5, epochs=None, sampler=Curriculum())
    head = run(stopped, stop)
    resumed = data.loader(2, seed=5, epochs=None, sampler=Curriculum())
    resumed.load_state_dict(through_json(stopped.state_dict()))
    assert head + run(resumed, 12 - stop) == whole


def test_the_next_epoch_is_chosen_after_the_results_of_the_last_batch():
    sampler = Curriculum()
    loader = numbers(12).loader(2, epochs=None, sampler=sampler)
    run(loader, 1)
    batch = next(loader)
    sampler.means = {str(i): 0.5 if i >= 8 else 1.0 for i in range(12)}
    assert len(batch) == 2
    assert sorted(uids(next(loader)) + uids(next(loader))) == [8, 9, 10, 11]


class Fixed:
    def __init__(self, order) -> None:
        self.order = order

    def indices(self, dataset, epoch, seed):
        return self.order


def test_a_sampler_may_repeat_rows_leave_some_out_and_need_no_state():
    loader = numbers(5).loader(2, sampler=Fixed([4, 4, 0, 1, 2]), epochs=2, drop_last=False)
    with pytest.raises(TypeError, match="a sampler"):
        len(loader)
    next(loader)
    loader.update(None, None)
    resumed = numbers(5).loader(2, sampler=Fixed([0, 0, 0]), epochs=2, drop_last=False)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert drain(resumed) == [[0, 1], [2], [0, 0], [0]]


@pytest.mark.parametrize(
    "order, complaint",
    [
        ([0, 5], "returned 5 in epoch 0; row indices go from 0 to 4"),
        ([0, -1], "returned -1"),
        ([0], "1 rows do not fill a batch"),
        ([], "0 rows do not fill a batch"),
        ([0.0, 1.0], "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_a_sampler_that_breaks_its_contract_is_named(order, complaint):
    loader = numbers(5).loader(2, sampler=Fixed(order))
    with pytest.raises(DataError, match=rf"Fixed\.indices.*{complaint}"):
        next(loader)


def test_a_sampler_that_learns_without_a_state_is_refused():
    class Forgetful(Fixed):
        def update(self, rollout, rewards): ...

    with pytest.raises(ConfigError, match="Forgetful has update"):
        numbers(4).loader(2, sampler=Forgetful([0, 1]))
    with pytest.raises(ConfigError, match="must have a method indices"):
        numbers(4).loader(2, sampler=[0, 1])


def test_a_sampler_state_that_json_cannot_hold_is_refused_when_it_is_saved():
    loader = numbers(12).loader(2, sampler=Curriculum(), epochs=None)
    loader.sampler.means = {"0": torch.tensor(0.5)}
    with pytest.raises(ConfigError, match="state of Curriculum must be JSON"):
        loader.state_dict()


def test_a_state_with_another_sampler_is_refused():
    saved = numbers(12).loader(2, epochs=None, sampler=Curriculum())
    next(saved)
    with pytest.raises(ConfigError, match="sampler was 'Curriculum' and is None"):
        numbers(12).loader(2, epochs=None).load_state_dict(saved.state_dict())

"""Which rows share a forward pass, and where their tokens lie: every row once, never above the budget, the same plan every time."""

from __future__ import annotations

import pytest
import torch

from rlhf import ConfigError, Rollout
from rlhf.scoring import LAYOUTS, Pack, collate, plan_micro_batches
from tests.batches import ragged_rollout


def sizes(packs, layout):
    """Tokens of the forward pass, padding included."""
    lengths = [pack.length for pack in packs]
    return sum(lengths) if layout == "packed" else len(lengths) * max(lengths)


def rows_of(plan):
    return [row for packs in plan for pack in packs for row in pack.rows]


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize("last_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_micro_batch_is_above_the_budget_unless_one_sequence_alone_is(layout, last_token):
    for seed in range(60):
        rollout = ragged_rollout(seed=seed, prompts=1 + seed % 5, n=1 + seed % 4, longest=3 + seed % 15)
        for budget in (1, 7, 16, 40, 10_000):
            plan = plan_micro_batches(rollout, budget=budget, layout=layout, hidden_size=8, last_token=last_token)
            assert sorted(rows_of(plan)) == list(range(len(rollout))), "every row exactly once"
            for packs in plan:
                alone = len(packs) == 1 and len(packs[0].rows) == 1
                assert sizes(packs, layout) <= budget or alone, (seed, budget, packs)


@pytest.mark.parametrize("last_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_length_of_a_pack_is_what_collate_feeds(layout, last_token):
    rollout = ragged_rollout(seed=4)
    for packs in plan_micro_batches(rollout, budget=48, layout=layout, last_token=last_token):
        assert collate(rollout, packs, layout=layout, last_token=last_token).input_ids.numel() == sizes(packs, layout)
        for pack in packs:
            responses = sum(int(rollout.lengths[row]) - (not last_token) for row in pack.rows)
            assert pack.length == len(rollout.prompt_ids[pack.rows[0]]) + responses


def test_a_budget_for_everything_makes_one_micro_batch_per_rollout():
    rollout = ragged_rollout(prompts=4, n=3)
    for layout in LAYOUTS:
        assert len(plan_micro_batches(rollout, budget=10_000, layout=layout)) == 1


def test_equal_lengths_give_equal_plans():
    rollout = ragged_rollout(seed=3, prompts=5, n=4)
    again = rollout.select(torch.arange(len(rollout)))
    for layout in LAYOUTS:
        assert plan_micro_batches(rollout, budget=40, layout=layout) == plan_micro_batches(again, budget=40, layout=layout)


def test_what_stands_in_the_responses_does_not_change_the_plan():
    rollout = ragged_rollout(seed=3, prompts=5, n=4)
    other = rollout.select(slice(None))
    other.response_ids = torch.randint_like(rollout.response_ids, 3, 20)
    assert plan_micro_batches(rollout, budget=40) == plan_micro_batches(other, budget=40)


def test_prompts_share_by_their_ids_whatever_their_group():
    rollout = Rollout.build([[5, 6], [5, 6], [5, 7]], [[8], [9], [9]], group=[0, 1, 1])
    (packs,) = plan_micro_batches(rollout, budget=100)
    assert sorted(sorted(pack.rows) for pack in packs) == [[0, 1], [2]]


def test_a_group_larger_than_the_budget_is_split():
    rollout = Rollout.build([[5] * 10] * 8, [[6] * 11] * 8)  # 10 tokens of prompt, 10 fed of each response
    plan = plan_micro_batches(rollout, budget=40)
    assert [[len(pack.rows) for pack in packs] for packs in plan] == [[3], [3], [2]]
    assert [packs[0].length for packs in plan] == [40, 40, 30]


def test_short_prompts_do_not_make_packs_of_quadratic_cost():
    # A row joins while length × (tokens already there) ≤ 3 · hidden · prompt = 3 · 8 · 1 = 24.
    rollout = Rollout.build([[5]] * 6, [[6] * 5] * 6)  # 4 tokens fed of each: 4·4 = 16 fits, 4·8 = 32 does not
    (packs,) = plan_micro_batches(rollout, budget=1000, hidden_size=8)
    assert [len(pack.rows) for pack in packs] == [2, 2, 2]
    (packs,) = plan_micro_batches(rollout, budget=1000, hidden_size=1024)
    assert [len(pack.rows) for pack in packs] == [6]


def test_rows_without_a_token_are_left_out_unless_the_last_state_is_needed():
    rollout = Rollout.build([[5, 6], [5, 6]], [[], [7]])
    assert rows_of(plan_micro_batches(rollout, budget=100)) == [1]
    assert sorted(rows_of(plan_micro_batches(rollout, budget=100, last_token=True))) == [0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_make_no_micro_batches(layout):
    assert plan_micro_batches(Rollout.build([], []), budget=10, layout=layout, last_token=True) == []


def test_unknown_layouts_and_budgets_are_refused():
    rollout = Rollout.build([[5]], [[6]])
    with pytest.raises(ConfigError, match="layout must be one of 'shared', 'padded', 'packed'; got 'shard'; did you mean 'shared'"):
        plan_micro_batches(rollout, budget=10, layout="shard")
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        plan_micro_batches(rollout, budget=0)


# ------------------------------------------------------------------ the tokens, by hand


@pytest.fixture
def two_answers():
    return Rollout.build([[5, 6]] * 2, [[7, 8, 9], [10, 11]], temperature=[0.5, 0.0])


def test_a_shared_pack_by_hand(two_answers):
    batch = collate(two_answers, [Pack((0, 1), 5)])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 10]]  # last tokens are targets only
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.mask.int().tolist() == [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]]
    assert batch.predicting.tolist() == [1, 2, 3, 1, 4]
    assert batch.targets.tolist() == [7, 8, 9, 10, 11]
    assert batch.temperature.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]  # 0 scores as 1
    assert (batch.rows.tolist(), batch.columns.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    assert batch.last.numel() == batch.last_rows.numel() == 0


def test_a_shared_pack_with_the_last_token_by_hand(two_answers):
    batch = collate(two_answers, [Pack((1, 0), 7)], last_token=True)
    assert batch.input_ids.tolist() == [[5, 6, 10, 11, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert batch.predicting.tolist() == [1, 2, 1, 4, 5]
    assert (batch.last.tolist(), batch.last_rows.tolist()) == ([3, 6], [1, 0])


def test_padded_rows_by_hand(two_answers):
    batch = collate(two_answers, [Pack((0,), 4), Pack((1,), 3)], layout="padded")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 10, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.mask is None
    assert batch.predicting.tolist() == [1, 2, 3, 5, 6]


def test_a_packed_line_by_hand(two_answers):
    batch = collate(two_answers, [Pack((0,), 5), Pack((1,), 4)], layout="packed", last_token=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 10, 11]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.mask is None
    assert batch.predicting.tolist() == [1, 2, 3, 6, 7]
    assert batch.last.tolist() == [4, 8]


def test_padding_beside_a_pack_is_seen_by_itself_only():
    rollout = Rollout.build([[5], [5], [6]], [[7, 8], [9, 10], [11]])
    batch = collate(rollout, [Pack((0, 1), 3), Pack((2,), 1)])
    others = batch.mask[1] & ~torch.eye(3, dtype=torch.bool)
    assert not others[:, 1:].any()
    assert batch.mask[1].any(1).all(), "a token that sees nothing would have a softmax of NaN"


def test_tool_output_is_fed_but_is_no_target():
    rollout = Rollout.build([[5]], [[7, 8, 9, 10]], response_masks=[[True, False, False, True]])
    batch = collate(rollout, [Pack((0,), 4)])
    assert batch.input_ids.tolist() == [[5, 7, 8, 9]]
    assert (batch.targets.tolist(), batch.columns.tolist()) == ([7, 10], [0, 3])
    assert batch.predicting.tolist() == [0, 3]


def test_the_state_after_an_empty_response_is_the_prompts_last():
    rollout = Rollout.build([[5, 6], [5, 6]], [[], [7, 8]])
    batch = collate(rollout, [Pack((1, 0), 4)], last_token=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert (batch.last.tolist(), batch.last_rows.tolist()) == ([3, 1], [1, 0])


def test_ids_in_the_padding_of_the_rollout_are_never_fed():
    rollout = Rollout.build([[5], [6]], [[7, 8, 9], [10]])
    rollout.response_ids[1, 1:] = 99_999
    for layout in LAYOUTS:
        (packs,) = plan_micro_batches(rollout, budget=100, layout=layout, last_token=True)
        batch = collate(rollout, packs, layout=layout, last_token=True)
        assert int(batch.input_ids.max()) <= 10
        assert int(batch.targets.max()) <= 10

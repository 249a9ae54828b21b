"""The rollout data type: what it accepts, how it is cut and joined, what it says about itself."""

from __future__ import annotations

import dataclasses
import html
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.errors import RolloutError
from rlhf.rollout import CharCodec, FinishReason, Rollout


def _fields(**changes: Any) -> dict[str, Any]:
    """Two rows: [3, 4, 7(tool), 5] that stopped and [6, 8] that was cut, with garbage in the padding."""
    return {
        "prompt_ids": [torch.tensor([1, 2]), torch.tensor([1])],
        "response_ids": torch.tensor([[3, 4, 7, 5], [6, 8, -100, 77]]),
        "lengths": torch.tensor([4, 2]),
        "response_mask": torch.tensor([[True, True, False, True], [True, True, False, False]]),
        "logprobs": torch.tensor([[-0.1, -0.2, math.nan, -0.3], [-0.4, -0.5, math.nan, math.inf]]),
        "temperature": torch.tensor([1.0, 0.0]),
        "filtered": torch.tensor([False, True]),
        "group": torch.tensor([0, 0]),
        "episode": torch.tensor([0, 1]),
        "weight_version": torch.tensor([3, 3]),
        "finish_reasons": [FinishReason.STOP, FinishReason.LENGTH],
        "rows": [{"ground_truth": "4"}, {"ground_truth": "5"}],
        "texts": ["a", "b"],
        "raw_texts": ["a</s>", "b"],
    } | changes


def _simple(count: int, *, length: int = 2, **options: Any) -> Rollout:
    return Rollout.build([[1]] * count, [[10 + i] * length for i in range(count)], **options)


def test_the_fields_are_those_of_the_design() -> None:
    assert [field.name for field in dataclasses.fields(Rollout)] == [
        "prompt_ids",
        "response_ids",
        "lengths",
        "response_mask",
        "logprobs",
        "temperature",
        "filtered",
        "group",
        "episode",
        "weight_version",
        "finish_reasons",
        "rows",
        "texts",
        "raw_texts",
        "extras",
    ]
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "max_turns", "error"]
    assert isinstance(FinishReason.STOP, str)


def test_anything_may_stand_in_the_padding_and_under_tool_output() -> None:
    rollout = Rollout(**_fields())
    assert len(rollout) == 2
    assert rollout.padding_mask.tolist() == [[True, True, True, True], [True, True, False, False]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt_ids": [torch.tensor([1, 2])]}, r"response_ids must be int64 \[1, any\] on the CPU, got int64 \[2, 4\] on cpu"),
        (
            {"prompt_ids": [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]},
            r"prompt_ids\[1\] must have at least one token, got none",
        ),
        ({"prompt_ids": [torch.tensor([1]), torch.tensor([1.0])]}, r"prompt_ids\[1\] must be int64 \[any\] on the CPU, got float32 \[1\]"),
        ({"prompt_ids": [torch.tensor([1]), torch.tensor([-100, 1])]}, r"prompt_ids\[1\] must hold token ids of 0 and above, got -100"),
        ({"prompt_ids": [[1, 2], torch.tensor([1])]}, r"prompt_ids\[0\] must be a tensor, int64 \[any\] on the CPU, got list"),
        ({"response_ids": torch.zeros(2, 4)}, r"response_ids must be int64 \[2, any\] on the CPU, got float32 \[2, 4\]"),
        (
            {"response_ids": torch.tensor([[3, -1, 7, 5], [6, 8, 0, 0]])},
            "response_ids must be 0 and above inside the response, got -1 at row 0, token 1",
        ),
        ({"lengths": torch.tensor([4, 5])}, r"lengths must be from 0 to the width 4 of response_ids, got \[4, 5\]"),
        ({"lengths": torch.tensor([4, -1])}, r"lengths must be from 0 to the width 4"),
        ({"lengths": torch.tensor([4, 1])}, "response_mask must be False from each row's length on, got True at row 1, token 1 of 1"),
        ({"lengths": torch.tensor([4, 2], dtype=torch.int32)}, r"lengths must be int64 \[2\] on the CPU, got int32 \[2\]"),
        ({"response_mask": torch.ones(2, 4)}, r"response_mask must be bool \[2, 4\] on the CPU, got float32 \[2, 4\]"),
        ({"response_mask": torch.ones(2, 3, dtype=torch.bool)}, r"response_mask must be bool \[2, 4\] on the CPU, got bool \[2, 3\]"),
        ({"logprobs": torch.zeros(2, 5)}, r"logprobs must be float32 \[2, 4\] on the CPU, got float32 \[2, 5\]"),
        ({"logprobs": torch.zeros(2, 4, dtype=torch.float64)}, r"logprobs must be float32 \[2, 4\] on the CPU, got float64"),
        ({"logprobs": torch.full((2, 4), -math.inf)}, "logprobs must be finite where response_mask is True, got -inf at row 0, token 0"),
        ({"temperature": torch.tensor([1.0, -1.0])}, r"temperature must be finite and 0 or above, got \[1.0, -1.0\]"),
        ({"temperature": torch.tensor([1.0, math.nan])}, "temperature must be finite"),
        ({"temperature": torch.tensor(1.0)}, r"temperature must be float32 \[2\] on the CPU, got float32 \[\]"),
        ({"filtered": torch.tensor([0, 1])}, r"filtered must be bool \[2\] on the CPU, got int64 \[2\]"),
        ({"group": torch.tensor([0, 0, 0])}, r"group must be int64 \[2\] on the CPU, got int64 \[3\]"),
        (
            {"group": torch.tensor([0, 1]), "episode": torch.tensor([5, 5])},
            "rows of one episode must share a group, got episode 5 in groups 0 and 1",
        ),
        ({"weight_version": torch.tensor([3.0, 3.0])}, r"weight_version must be int64 \[2\] on the CPU, got float32 \[2\]"),
        (
            {"finish_reasons": [FinishReason.STOP]},
            "finish_reasons must be a list of 2 entries, one for each prompt in prompt_ids, got 1 entries",
        ),
        ({"finish_reasons": ["stop", "eos"]}, "a finish reason must be among 'stop', 'length', 'abort', 'max_turns', 'error', got 'eos'"),
        ({"rows": [{}]}, "rows must be a list of 2 entries"),
        ({"rows": [{}, None]}, r"rows\[1\] must be a dict, got NoneType"),
        ({"texts": ("a", "b")}, "texts must be a list of 2 entries, one for each prompt in prompt_ids, got tuple"),
        ({"texts": ["a", None]}, r"texts\[1\] must be a str, got NoneType"),
        ({"raw_texts": ["a"]}, "raw_texts must be a list of 2 entries"),
        ({"extras": {"x": torch.zeros(3)}}, r"extras\['x'\] must be float32 \[2\] on the CPU, got float32 \[3\]"),
        ({"extras": {"x": torch.tensor(1.0)}}, r"extras\['x'\] must be float32 \[2\] on the CPU, got float32 \[\]"),
        ({"extras": {"x": [1]}}, r"extras\['x'\] must have 2 entries, one for each row, got 1"),
        ({"extras": {"x": 1.0}}, r"extras\['x'\] must be a tensor or a list with 2 entries, got float"),
        ({"extras": {"": [1, 2]}}, "extras must have non-empty str keys, got ''"),
        (
            {"response_mask": torch.ones(2, 4, dtype=torch.bool, device="meta")},
            r"response_mask must be bool \[2, 4\] on the CPU, got bool \[2, 4\] on meta",
        ),
    ],
)
def test_fields_that_do_not_fit_are_named_with_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        Rollout(**_fields(**changes))
    assert isinstance(caught.value, ValueError)


def test_build_pads_to_the_right_and_fills_in_what_is_not_given() -> None:
    rollout = Rollout.build([[1, 2], [3]], [[4, 5, 6], [7]])
    assert [ids.tolist() for ids in rollout.prompt_ids] == [[1, 2], [3]]
    assert rollout.response_ids.tolist() == [[4, 5, 6], [7, 0, 0]]
    assert rollout.lengths.tolist() == [3, 1]
    assert rollout.response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert rollout.logprobs is None
    assert rollout.temperature.tolist() == [1.0, 1.0]
    assert rollout.filtered.tolist() == [False, False]
    assert rollout.group.tolist() == [0, 1]
    assert rollout.episode.tolist() == [0, 1]
    assert rollout.weight_version.tolist() == [0, 0]
    assert rollout.finish_reasons == [FinishReason.STOP, FinishReason.STOP]
    assert rollout.rows == [{}, {}]
    assert rollout.texts == rollout.raw_texts == ["", ""]
    assert rollout.extras == {}


def test_rows_made_by_build_are_not_one_dict() -> None:
    rollout = _simple(2)
    rollout.rows[0]["seen"] = True
    assert rollout.rows[1] == {}


def test_build_spreads_one_value_over_all_rows() -> None:
    rollout = _simple(2, temperature=0.5, filtered=True, weight_version=7, finish_reasons="length", group=4)
    assert rollout.temperature.tolist() == [0.5, 0.5]
    assert rollout.filtered.tolist() == [True, True]
    assert rollout.weight_version.tolist() == [7, 7]
    assert rollout.finish_reasons == [FinishReason.LENGTH] * 2
    assert rollout.group.tolist() == [4, 4]


@pytest.mark.parametrize(
    "ids", [[5, 6], (5, 6), torch.tensor([5, 6], dtype=torch.int32), np.array([5, 6])], ids=["list", "tuple", "int32", "numpy"]
)
def test_ids_may_come_as_lists_tensors_or_arrays(ids: Any) -> None:
    rollout = Rollout.build([ids], [ids])
    assert rollout.prompt_ids[0].tolist() == rollout.response_ids[0].tolist() == [5, 6]
    assert rollout.prompt_ids[0].dtype == rollout.response_ids.dtype == torch.int64


def test_log_probabilities_of_tool_output_are_stored_as_0() -> None:
    rollout = Rollout.build([[1]], [[2, 3, 4]], logprobs=[[-0.5, math.nan, -0.25]], response_masks=[[1, 0, 1]])
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [[-0.5, 0.0, -0.25]]


@pytest.mark.parametrize("ids, logprobs", [(5, 4), (120, 121), (1, 0), (0, 1)], ids=["one short", "one long", "none", "one for nothing"])
def test_log_probabilities_must_be_as_many_as_the_ids(ids: int, logprobs: int) -> None:
    with pytest.raises(ValueError, match=rf"logprobs\[1\] must have {ids} entries, one for each id of the response, got \[{logprobs}\]"):
        Rollout.build([[1], [1]], [[2], [2] * ids], logprobs=[[-1.0], [-1.0] * logprobs])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([[1]], [[2], [3]]), "prompt_ids must have one entry for each of the 2 responses, got 1"),
        (([[1]], [[2.5]]), r"responses\[0\] must be a flat list of integer token ids, got float32 of shape \[1\]"),
        (([[1]], [[[2]]]), r"responses\[0\] must be a flat list of integer token ids, got int64 of shape \[1, 1\]"),
        (([[True]], [[2]]), r"prompt_ids\[0\] must be a flat list of integer token ids, got bool"),
        (([[1]], ["hello"]), r"responses\[0\] must be token ids, got text; use Rollout.from_texts"),
        (([[1]], [[None]]), r"responses\[0\] must be a list of token ids, got list that torch cannot read"),
        (([[]], [[2]]), r"prompt_ids\[0\] must have at least one token"),
    ],
)
def test_build_names_ids_that_are_none(arguments: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Rollout.build(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"logprobs": [[-1.0, -1.0]]}, "logprobs must have one list for each of the 2 responses, got 1"),
        ({"logprobs": [[-1.0, None], [-1.0, -1.0]]}, r"logprobs\[0\] must be a flat list of 2 numbers"),
        ({"logprobs": [None, [-1.0, -1.0]]}, r"logprobs\[0\] must be a flat list of 2 numbers"),
        ({"response_masks": [[True], [True, True]]}, r"response_masks\[0\] must have 2 entries"),
        ({"temperature": [1.0]}, r"temperature must have one entry for each of the 2 responses, got shape \[1\]"),
        ({"temperature": "hot"}, "temperature must be one number or 2"),
        ({"group": [0.5, 1.0]}, "group must be integers, got float32"),
        ({"weight_version": [1, 2, 3]}, "weight_version must have one entry for each of the 2 responses"),
        ({"finish_reasons": ["stop"]}, "finish_reasons must be a list of 2 entries"),
        ({"finish_reasons": "eos"}, "got 'eos'"),
        ({"rows": [{}]}, "rows must be a list of 2 entries"),
    ],
)
def test_build_names_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _simple(2, **options)


def test_a_rollout_may_be_empty_or_hold_empty_responses() -> None:
    nothing = Rollout.build([], [])
    assert (len(nothing), list(nothing.response_ids.shape)) == (0, [0, 0])
    silent = Rollout.build([[1]], [[]], logprobs=[[]])
    assert silent.response_ids.shape == silent.response_mask.shape == (1, 0)
    assert silent.lengths.tolist() == [0]
    assert silent.logprobs is not None


def test_a_response_of_the_end_token_alone_has_length_1_and_counts(bpe: Any) -> None:
    rollout = Rollout.build([[5]], [[bpe.eos_token_id]], logprobs=[[-0.5]], tokenizer=bpe)
    assert rollout.lengths.tolist() == [1]
    assert rollout.response_mask.tolist() == [[True]]
    assert (rollout.texts, rollout.raw_texts) == ([""], ["<|im_end|>"])


def test_texts_hide_the_end_token_and_the_ids_keep_it(bpe: Any) -> None:
    ids = [*bpe("a").input_ids, bpe.eos_token_id]
    rollout = Rollout.build([[5]], [ids], tokenizer=bpe)
    assert rollout.texts == ["a"]
    assert rollout.raw_texts == ["a<|im_end|>"]
    assert rollout.response_ids[0].tolist() == ids


def test_an_end_token_that_doubles_as_padding_still_counts() -> None:
    rollout = Rollout.build([[1], [1]], [[5, 0], [6, 7, 0]])  # 0 is both
    assert rollout.response_mask.tolist() == [[True, True, False], [True, True, True]]


def test_ids_cut_inside_a_character_are_kept_and_shown_as_replacement(bpe: Any) -> None:
    half = bpe("\U0001f600").input_ids[:2]
    assert len(bpe("\U0001f600").input_ids) == 4
    rollout = Rollout.build([[5]], [half], tokenizer=bpe)
    assert rollout.response_ids[0].tolist() == half
    assert "�" in rollout.texts[0]
    assert bpe(rollout.texts[0]).input_ids != half


def test_ids_survive_where_decoding_and_encoding_would_change_them(bpe: Any) -> None:
    letters = [bpe.convert_tokens_to_ids(letter) for letter in "hello"]
    rollout = Rollout.build([[5]], [letters], tokenizer=bpe)
    assert rollout.texts == ["hello"]
    assert rollout.response_ids[0].tolist() == letters != bpe("hello").input_ids


def test_a_stop_string_in_the_ids_is_in_the_text_too(bpe: Any) -> None:
    ids = bpe("4</answer>").input_ids
    rollout = Rollout.build([[5]], [ids], tokenizer=bpe)
    assert rollout.texts == ["4</answer>"]
    assert rollout.response_ids[0].tolist() == ids


def test_spaces_before_punctuation_are_shown_as_the_policy_wrote_them() -> None:
    class Tidying(CharCodec):
        """Cleans up unless told not to, as tokenizers of word pieces do."""

        def decode(self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True) -> str:
            text = super().decode(ids, skip_special_tokens)
            return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    codec = Tidying()
    assert codec.decode(codec.encode("a .")) == "a."
    assert Rollout.build([[5]], [codec.encode("a .")], tokenizer=codec).texts == ["a ."]


def test_given_texts_are_kept_and_only_the_missing_ones_decoded(bpe: Any) -> None:
    rollout = Rollout.build([[5]], [bpe("a").input_ids], tokenizer=bpe, texts=["as the engine said"])
    assert rollout.texts == ["as the engine said"]
    assert rollout.raw_texts == ["a"]


@pytest.mark.parametrize(
    "responses, reasons, truncated",
    [
        ([[2] * 6, [2] * 4], ["stop", "length"], [False, True]),
        ([[151645]], ["stop"], [False]),
        ([[2, 99]], ["length"], [True]),
        ([[2], [2], [2], [2], [2]], ["stop", "length", "abort", "max_turns", "error"], [False, True, False, True, False]),
        ([[5, 6, 32007]], ["stop"], [False]),
        ([[]], ["length"], [True]),
    ],
    ids=["not by the width", "not by another end token", "not by the last id", "each reason", "a second end token", "not by having tokens"],
)
def test_truncation_is_judged_by_the_finish_reason_alone(responses: Any, reasons: list[str], truncated: list[bool]) -> None:
    rollout = Rollout.build([[1]] * len(responses), responses, finish_reasons=reasons)
    assert rollout.truncated.tolist() == truncated


@pytest.mark.parametrize(
    "indices, picked",
    [
        (torch.tensor([2, 0]), [2, 0]),
        ([2, 0], [2, 0]),
        ((1,), [1]),
        (range(1, 4), [1, 2, 3]),
        ([1, 1, 1], [1, 1, 1]),
        ([-1], [3]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, True, False]), [1, 2]),
        (np.array([3, 1]), [3, 1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([], []),
        ([False] * 4, []),
    ],
)
def test_select_takes_rows_in_the_order_asked_for(indices: Any, picked: list[int]) -> None:
    whole = Rollout.build(
        [[1]] * 4,
        [[10], [11, 11], [12], [13]],
        logprobs=[[-0.0], [-1.0, -1.0], [-2.0], [-3.0]],
        group=[5, 5, 8, 8],
        episode=[0, 1, 4, 4],
        weight_version=[0, 1, 2, 3],
        finish_reasons=["stop", "length", "abort", "error"],
        rows=[{"i": i} for i in range(4)],
        texts=list("abcd"),
        extras={"t": torch.arange(4), "l": list("wxyz")},
    )
    part = whole.select(indices)
    assert part.response_ids[:, 0].tolist() == [10 + i for i in picked]
    assert part.response_ids.shape[1] == 2  # the width stays, so that other [B, T] tensors can be selected beside it
    assert part.group.tolist() == [[5, 5, 8, 8][i] for i in picked]
    assert part.episode.tolist() == [[0, 1, 4, 4][i] for i in picked]
    assert part.weight_version.tolist() == picked
    assert part.finish_reasons == [whole.finish_reasons[i] for i in picked]
    assert [row["i"] for row in part.rows] == picked
    assert part.texts == part.raw_texts == ["abcd"[i] for i in picked]
    assert part.extras["t"].tolist() == picked
    assert part.extras["l"] == ["wxyz"[i] for i in picked]
    assert part.logprobs is not None
    assert part.logprobs[:, 0].tolist() == [-float(i) for i in picked]


@pytest.mark.parametrize(
    "indices, message",
    [
        ([4], "indices must be below the 4 rows of the rollout, got 4"),
        ([-5], "got -5"),
        ([True, False], "a bool mask must have one entry for each of the 4 rows, got 2"),
        ([0.5], "indices must be integers or a bool mask, got float32"),
        (2, r"write \[i\] for one row"),
        ([[0], [1]], "flat list of rows"),
        (["a"], "torch cannot read"),
    ],
)
def test_select_refuses_rows_that_are_not_there(indices: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        _simple(4).select(indices)


def test_changing_a_selection_leaves_the_whole_alone() -> None:
    whole = _simple(2)
    part = whole.select(slice(0, 2))
    part.response_ids += 1
    part.lengths -= 1
    assert whole.response_ids.tolist() == [[10, 10], [11, 11]]
    assert whole.lengths.tolist() == [2, 2]


def test_concat_pads_to_the_longest_and_keeps_every_row() -> None:
    short = Rollout.build([[1]], [[2]], logprobs=[[-1.0]], temperature=0.5, rows=[{"i": 0}], texts=["a"], weight_version=3)
    long = Rollout.build(
        [[1, 2]], [[3, 4, 5]], logprobs=[[-2.0, -3.0, -4.0]], filtered=True, rows=[{"i": 1}], texts=["b"], finish_reasons="length"
    )
    joined = Rollout.concat([short, long])
    assert [ids.tolist() for ids in joined.prompt_ids] == [[1], [1, 2]]
    assert joined.response_ids.tolist() == [[2, 0, 0], [3, 4, 5]]
    assert joined.response_mask.tolist() == [[True, False, False], [True, True, True]]
    assert joined.logprobs is not None
    assert joined.logprobs.tolist() == [[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0]]
    assert joined.lengths.tolist() == [1, 3]
    assert joined.temperature.tolist() == [0.5, 1.0]
    assert joined.filtered.tolist() == [False, True]
    assert joined.weight_version.tolist() == [3, 0]
    assert joined.finish_reasons == [FinishReason.STOP, FinishReason.LENGTH]
    assert joined.rows == [{"i": 0}, {"i": 1}]
    assert joined.texts == ["a", "b"]


@pytest.mark.parametrize(
    "groups, expected",
    [
        ([[0, 0], [0, 0]], [0, 0, 1, 1]),
        ([[5, 5], [7, 5]], [0, 0, 2, 1]),
        ([[0, 1], [1, 2]], [0, 1, 2, 3]),
        ([[3, 0, 3]], [1, 0, 1]),
        ([[0], [], [0]], [0, 1]),
        ([[-1, 10**12], [10**12, -1]], [0, 1, 3, 2]),
    ],
    ids=["same ids", "overlapping ids", "shifted", "one part", "an empty part", "far apart"],
)
def test_concat_renumbers_groups_so_that_parts_never_share_one(groups: list[list[int]], expected: list[int]) -> None:
    parts = [Rollout.build([[1]] * len(ids), [[2]] * len(ids), group=ids) for ids in groups]
    joined = Rollout.concat(parts)
    assert joined.group.tolist() == expected
    assert len(set(joined.episode.tolist())) == len(joined)


def test_concat_keeps_the_rows_of_an_episode_together() -> None:
    part = Rollout.build([[1]] * 3, [[2]] * 3, group=[0, 0, 0], episode=[0, 0, 1])
    joined = Rollout.concat([part, part])
    assert joined.episode.tolist() == [0, 0, 1, 2, 2, 3]
    assert joined.group.tolist() == [0, 0, 0, 1, 1, 1]


def test_select_and_concat_undo_each_other() -> None:
    whole = Rollout.build([[1]] * 4, [[2], [3, 3], [4], [5, 5, 5]], logprobs=[[-1.0], [-1.0] * 2, [-1.0], [-1.0] * 3], group=[0, 0, 1, 1])
    again = Rollout.concat([whole.select([0, 1]), whole.select([2, 3])])
    for field in dataclasses.fields(Rollout):
        old, new = getattr(whole, field.name), getattr(again, field.name)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new or all(map(torch.equal, old, new)), field.name


def test_concat_joins_extras_and_pads_those_with_one_value_per_token() -> None:
    parts = [
        _simple(1, length=2, extras={"per_token": torch.tensor([[1.0, 2.0]]), "pair": torch.tensor([[7, 8, 9]]), "list": ["a"]}),
        _simple(1, length=4, extras={"per_token": torch.tensor([[3.0, 4.0, 5.0, 6.0]]), "pair": torch.tensor([[1, 2, 3]]), "list": ["b"]}),
    ]
    extras = Rollout.concat(parts).extras
    assert extras["per_token"].tolist() == [[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 5.0, 6.0]]
    assert extras["pair"].tolist() == [[7, 8, 9], [1, 2, 3]]
    assert extras["list"] == ["a", "b"]


@pytest.mark.parametrize(
    "first, second, message",
    [
        ({"logprobs": [[-1.0, -1.0]]}, {}, "logprobs must be present in all parts of concat or in none"),
        ({"extras": {"x": [1]}}, {}, r"got \['x'\] in only one of parts 0 and 1; add the key"),
        ({}, {"extras": {"x": [1]}}, r"got \['x'\] in only one of parts 0 and 1; add the key"),
        (
            {"extras": {"x": [1]}},
            {"extras": {"x": torch.ones(1)}},
            r"extras\['x'\] must be a tensor in all parts of concat or a list in all",
        ),
        ({"extras": {"x": torch.ones(1)}}, {"extras": {"x": torch.ones(1, dtype=torch.int64)}}, r"extras\['x'\] must agree in dtype"),
        (
            {"extras": {"x": torch.ones(1, 3)}},
            {"extras": {"x": torch.ones(1, 4)}},
            r"extras\['x'\] must agree in dtype and in all dimensions",
        ),
    ],
)
def test_concat_refuses_parts_that_do_not_match(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Rollout.concat([_simple(1, **first), _simple(1, **second)])


def test_concat_needs_a_part() -> None:
    with pytest.raises(RolloutError, match="at least one rollout, got none"):
        Rollout.concat([])


def test_a_rollout_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Rollout(**_fields())))
    assert again.finish_reasons == [FinishReason.STOP, FinishReason.LENGTH]
    assert again.response_ids.tolist() == [[3, 4, 7, 5], [6, 8, -100, 77]]


def test_metrics_count_what_is_there() -> None:
    rollout = Rollout.build(
        [[1], [1, 1], [1, 1, 1], [1, 1]],
        [[2], [2, 2], [2, 2, 2], [2, 2]],
        response_masks=[[1], [1, 0], [1, 0, 1], [1, 1]],
        group=[0, 0, 1, 1],
        episode=[0, 1, 2, 2],
        finish_reasons=["stop", "length", "abort", "max_turns"],
        weight_version=[3, 3, 3, 2],
    )
    assert rollout.metrics() == {
        "rollout/rows": 4.0,
        "rollout/groups": 2.0,
        "rollout/episodes": 3.0,
        "rollout/response_tokens": 6.0,
        "rollout/prompt_length": 2.0,
        "rollout/response_length": 2.0,
        "rollout/response_length_min": 1.0,
        "rollout/response_length_max": 3.0,
        "rollout/truncation_rate": 0.5,
        "rollout/abort_rate": 0.25,
        "rollout/mixed_version_fraction": 0.25,
    }


def test_lengths_are_reported_whatever_the_mask_leaves_out() -> None:
    rollout = Rollout.build([[1], [1]], [[2] * 5, [2] * 128], response_masks=[[True] * 5, [False] * 128], finish_reasons=["stop", "length"])
    metrics = rollout.metrics()
    assert metrics["rollout/response_length"] == 66.5
    assert metrics["rollout/response_length_min"] == 5.0
    assert metrics["rollout/truncation_rate"] == 0.5
    assert metrics["rollout/response_tokens"] == 5.0


def test_an_empty_rollout_has_counts_and_no_means() -> None:
    assert Rollout.build([], []).metrics() == {
        "rollout/rows": 0.0,
        "rollout/groups": 0.0,
        "rollout/episodes": 0.0,
        "rollout/response_tokens": 0.0,
    }


def test_a_rollout_of_empty_responses_has_finite_metrics() -> None:
    metrics = Rollout.build([[1]], [[]]).metrics()
    assert metrics["rollout/response_length"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_repr_is_one_line_without_model_text() -> None:
    rollout = _simple(3, texts=["line\nbreak"] * 3, group=[0, 0, 1], finish_reasons=["stop", "stop", "length"], weight_version=[1, 2, 2])
    assert repr(rollout) == (
        "Rollout(3 rows, 2 groups, 6 sampled tokens, longest 2, finish: length=1, stop=2, weight version 1 to 2, no log-probabilities)"
    )
    assert repr(Rollout.build([], [])) == (
        "Rollout(0 rows, 0 groups, 0 sampled tokens, longest 0, finish: none, weight version none, no log-probabilities)"
    )


def test_the_notebook_view_shows_model_and_data_text_and_never_runs_it() -> None:
    script = "<script>alert('x')</script>"
    view = _simple(1, texts=[script], rows=[{"prompt": "<img src=x onerror=y>"}])._repr_html_()
    assert "<script" not in view
    assert "<img" not in view
    assert html.escape(script) in view
    assert "&lt;img src=x onerror=y&gt;" in view


def test_the_notebook_view_is_short_however_long_the_rollout() -> None:
    view = _simple(100, texts=["x" * 10**5] * 100)._repr_html_()
    assert "and 95 more rows" in view
    assert len(view) < 10_000


def test_the_notebook_view_survives_broken_text_and_no_rows() -> None:
    assert "\ufffd" in _simple(1, texts=["\ud83d"])._repr_html_()
    assert _simple(1, texts=["\ud83d"])._repr_html_().encode("utf-8")
    assert "0 rows" in Rollout.build([], [])._repr_html_()


def test_to_pandas_has_a_line_per_response_with_the_fields_of_its_row() -> None:
    rollout = Rollout.build(
        [[1], [1]],
        [[2, 3], [4]],
        logprobs=[[-1.0, -2.0], [-3.0]],
        response_masks=[[True, True], [False]],
        rows=[{"prompt": "p", "ground_truth": "4", "length": 9}, {"prompt": [{"role": "user", "content": "q"}], "other": 1}],
        texts=["a", "b\ud83d"],
        finish_reasons=["stop", "length"],
        extras={"env_reward": torch.tensor([0.5, 1.0]), "wide": torch.zeros(2, 3), "group": ["x", "y"]},
        weight_version=3,
    )
    frame = rollout.to_pandas()
    assert len(frame) == 2
    assert frame["prompt"].tolist() == ["p", '[{"role": "user", "content": "q"}]']
    assert frame["response"].tolist() == ["a", "b\ud83d"]
    assert frame["length"].tolist() == [2, 1]
    assert frame["row_length"].tolist() == [9, None]
    assert frame["finish_reason"].tolist() == ["stop", "length"]
    assert frame["weight_version"].tolist() == [3, 3]
    assert frame["mean_logprob"][0] == -1.5
    assert math.isnan(frame["mean_logprob"][1])
    assert frame["ground_truth"].tolist() == ["4", None]
    assert frame["env_reward"].tolist() == [0.5, 1.0]
    assert frame["extra_group"].tolist() == ["x", "y"]
    assert frame["group"].tolist() == [0, 1]
    assert "wide" not in frame
    assert frame.groupby("group")["env_reward"].mean().tolist() == [0.5, 1.0]


def test_to_pandas_decodes_prompts_where_a_tokenizer_is_given() -> None:
    codec = CharCodec()
    rollout = Rollout.build([codec.encode("hi")], [codec.encode("yo")], rows=[{"prompt": "raw"}])
    frame = rollout.to_pandas(codec)
    assert frame["prompt"].tolist() == ["hi"]
    assert frame["row_prompt"].tolist() == ["raw"]


def test_to_pandas_of_an_empty_rollout_has_columns_and_no_lines() -> None:
    frame = Rollout.build([], []).to_pandas()
    assert len(frame) == 0
    assert "response" in frame.columns


def test_to_dataset_carries_the_ids_and_turns_mixed_fields_into_text() -> None:
    rollout = Rollout.build(
        [[1, 2], [1]],
        [[2, 3], [4]],
        logprobs=[[-1.0, -2.0], [-3.0]],
        rows=[{"ground_truth": "4", "mixed": 1}, {"ground_truth": "5", "mixed": "one"}],
        texts=["a\ud83d", "b"],
    )
    dataset = rollout.to_dataset()
    assert dataset.num_rows == 2
    assert dataset["prompt_ids"][:] == [[1, 2], [1]]
    assert dataset["response_ids"][:] == [[2, 3], [4]]
    assert dataset["logprobs"][:] == [[-1.0, -2.0], [-3.0]]
    assert dataset["response_mask"][:] == [[True, True], [True]]
    assert dataset["ground_truth"][:] == ["4", "5"]
    assert dataset["mixed"][:] == ["1", '"one"']
    assert dataset["response"][:] == ["a\ufffd", "b"]


@pytest.mark.parametrize(
    "responses, options, ids, mask",
    [
        (["ab"], {}, [[99, 100, 1]], [[True] * 3]),
        (["ab"], {"append_eos": False}, [[99, 100]], [[True] * 2]),
        ([""], {}, [[1]], [[True]]),
        ([""], {"append_eos": False}, [[]], [[]]),
        (["a", "abc"], {}, [[99, 1, 0, 0], [99, 100, 101, 1]], [[True, True, False, False], [True] * 4]),
        (["é"], {}, [[0xE9 + 2, 1]], [[True] * 2]),
    ],
    ids=["end token added", "as it is", "empty text is an end token", "empty text", "padded", "not ASCII"],
)
def test_stored_texts_become_ids_that_all_count(responses: list[str], options: dict[str, Any], ids: Any, mask: Any) -> None:
    rollout = Rollout.from_texts(["q"] * len(responses), responses, CharCodec(), **options)
    assert rollout.response_ids.tolist() == ids
    assert rollout.response_mask.tolist() == mask
    assert rollout.logprobs is None
    assert rollout.texts == responses
    assert rollout.weight_version.tolist() == [-1] * len(responses)
    assert rollout.finish_reasons == [FinishReason.STOP] * len(responses)
    assert rollout.rows == [{"prompt": "q"}] * len(responses)
    assert rollout.group.tolist() == list(range(len(responses)))


def test_stored_responses_of_one_prompt_can_share_a_group() -> None:
    rollout = Rollout.from_texts(["q", "q"], ["a", "b"], CharCodec(), group=[0, 0], rows=[{"ground_truth": "a"}] * 2, weight_version=4)
    assert rollout.group.tolist() == [0, 0]
    assert rollout.episode.tolist() == [0, 1]
    assert rollout.rows == [{"ground_truth": "a"}] * 2
    assert rollout.weight_version.tolist() == [4, 4]


def test_stored_text_that_ends_with_the_end_token_gets_no_second_one(bpe: Any) -> None:
    rollout = Rollout.from_texts(["hello", "hello"], ["4<|im_end|>", "4"], bpe)
    assert rollout.response_ids[0].tolist() == rollout.response_ids[1].tolist() == [*bpe("4").input_ids, bpe.eos_token_id]
    assert rollout.texts == ["4", "4"]


def test_stored_responses_get_no_beginning_of_sequence_token_and_prompts_do(with_bos: Any) -> None:
    rollout = Rollout.from_texts(["hello"], ["world"], with_bos)
    bos = with_bos.bos_token_id
    assert rollout.prompt_ids[0].tolist() == with_bos("hello").input_ids
    assert rollout.prompt_ids[0][0] == bos
    assert bos not in rollout.response_ids[0].tolist()


def test_stored_chats_use_the_generation_prompt(bpe: Any) -> None:
    rollout = Rollout.from_texts([[{"role": "user", "content": "hello"}]], ["4"], bpe)
    assert bpe.decode(rollout.prompt_ids[0]) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "prompts, responses, options, message",
    [
        (["q"], ["a", "b"], {}, "prompt_ids must have one entry for each of the 2 responses, got 1"),
        (["q"], "a", {}, "responses must be a list of texts"),
        (["q"], [[1, 2]], {}, r"responses\[0\] must be a str, got list; use Rollout.build"),
        ([""], ["a"], {}, "prompt 0"),
        (["q"], ["a"], {"rows": []}, "rows must be a list of 1 entries"),
    ],
)
def test_stored_texts_that_do_not_fit_are_named(prompts: Any, responses: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Rollout.from_texts(prompts, responses, CharCodec(), **options)


def test_an_end_token_cannot_be_added_without_one() -> None:
    codec = CharCodec()
    codec.eos_token_id = None
    with pytest.raises(RolloutError, match="append_eos=True needs a tokenizer with an end token"):
        Rollout.from_texts(["q"], ["a"], codec)
    assert Rollout.from_texts(["q"], ["a"], codec, append_eos=False).lengths.tolist() == [1]

"""A saved rollout comes back bit for bit, or an error says which file is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from rlhf.errors import RolloutError
from rlhf.rollout import CharCodec, Rollout, Turn


def _rollout(**changes: Any) -> Rollout:
    options: dict[str, Any] = {
        "logprobs": [[-0.1, -1e-30, -3.0], [-0.7]],
        "response_masks": [[True, False, True], [True]],
        "temperature": [1.0, 0.7],
        "filtered": [False, True],
        "group": [4, 4],
        "episode": [2, 9],
        "weight_version": [3, -1],
        "finish_reasons": ["max_turns", "error"],
        "rows": [{"prompt": "a", "extra_info": {"index": 7, "nested": [1, None, True, 2.5]}}, {}],
        "texts": ["x", "y"],
        "raw_texts": ["x</s>", "y"],
    }
    return Rollout.build([[1, 2, 3], [4]], [[5, 6, 7], [8]], **(options | changes))


def _assert_equal(old: Rollout, new: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, torch.Tensor):
            _assert_same_bits(before, after)
        elif field.name == "prompt_ids":
            assert len(before) == len(after)
            for one, other in zip(before, after, strict=True):
                _assert_same_bits(one, other)
        elif field.name == "extras":
            assert list(before) == list(after)
            for name, value in before.items():
                if isinstance(value, torch.Tensor):
                    _assert_same_bits(value, after[name])
                else:
                    assert value == after[name]
        else:
            assert before == after, field.name


def _assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)) if one.numel() else True


@pytest.mark.parametrize(
    "rollout",
    [
        _rollout(),
        _rollout(logprobs=None),
        _rollout(extras={"env_reward": torch.tensor([0.5, math.nan]), "judge": [{"note": "ok"}, None]}),
        _rollout(extras={"half": torch.tensor([[1.5], [-0.0]], dtype=torch.bfloat16), "flags": torch.tensor([True, False])}),
        _rollout(extras={"tokens": torch.arange(6, dtype=torch.int32).view(2, 3), "none": torch.zeros(2, 0)}),
        _rollout(extras={"a.b": [1, 2], "lengths": torch.tensor([9, 9]), "weird name/é": torch.tensor([1, 2])}),
        _rollout(texts=["日本 \U0001f600 é", "\ud83d lone \udc00"], rows=[{"prompt": "\udfff"}, {"\ud800": "key"}]),
        _rollout(texts=["line\nbreak\r\n\u2028 \x00 \x85", '"quoted" \\'], raw_texts=["", "\t"]),
        Rollout.build([], []),
        Rollout.build([[1], [2]], [[], []], logprobs=[[], []]),
        Rollout.build([[2**31 + 5]], [[2**40]], group=[2**62], weight_version=2**33),
        _rollout().select([1, 0, 1]),
        _rollout().select([]),
        Rollout.from_turns(
            [[Turn([1], [2], [-0.5], 3, 1.0), Turn([1, 2, 7], [3], [-0.25], 4), Turn([9], [4], [-0.125], 5)]], rows=[{"uid": "u"}]
        ),
        Rollout.from_texts(["hi"], ["ho"], CharCodec()),
    ],
    ids=[
        "plain",
        "without log-probabilities",
        "extras of both kinds",
        "bfloat16 and bool extras",
        "per-token and empty extras",
        "awkward names of extras",
        "unicode and lone surrogates",
        "line breaks of all kinds",
        "no rows",
        "empty responses",
        "large numbers",
        "rows in another order and twice",
        "an empty selection",
        "forked turns",
        "offline",
    ],
)
def test_what_is_saved_comes_back_bit_for_bit(rollout: Rollout, tmp_path: Path) -> None:
    rollout.save(tmp_path / "r")
    _assert_equal(rollout, Rollout.load(tmp_path / "r"))


def test_not_a_number_in_the_padding_keeps_its_bits(tmp_path: Path) -> None:
    rollout = _rollout()
    assert rollout.logprobs is not None
    rollout.logprobs[1, 2] = math.nan
    rollout.response_ids[1, 1:] = -100
    rollout.save(tmp_path / "r")
    _assert_equal(rollout, Rollout.load(tmp_path / "r"))


def test_a_loaded_rollout_can_be_changed_without_touching_the_file(tmp_path: Path) -> None:
    rollout = _rollout()
    rollout.save(tmp_path / "r")
    loaded = Rollout.load(tmp_path / "r")
    loaded.response_ids.zero_()
    loaded.prompt_ids[0].zero_()
    _assert_equal(rollout, Rollout.load(tmp_path / "r"))


def test_numbers_of_other_libraries_and_tuples_become_plain_ones(tmp_path: Path) -> None:
    row = {"i": np.int64(3), "f": np.float32(0.5), "a": np.array([[1, 2]]), "t": torch.tensor([1.5]), "pair": (1, "b"), "nan": math.nan}
    _rollout(rows=[row, {}]).save(tmp_path / "r")
    loaded = Rollout.load(tmp_path / "r").rows[0]
    assert math.isnan(loaded.pop("nan"))
    assert loaded == {"i": 3, "f": 0.5, "a": [[1, 2]], "t": [1.5], "pair": [1, "b"]}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": [{"x": {"image": b"png"}}, {}]}, r"rows\[0\]\['x'\]\['image'\] must be text, numbers.*got bytes"),
        ({"rows": [{}, {"x": {1: "a"}}]}, r"rows\[1\]\['x'\] must have str keys to be saved as JSON, got the key 1"),
        ({"extras": {"x": [1, {2, 3}]}}, r"extras\['x'\]\[1\] must be text.*got set"),
    ],
)
def test_what_json_cannot_hold_is_named_and_nothing_is_written(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=message):
        _rollout(**changes).save(tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_holds_only_safetensors_and_json(tmp_path: Path) -> None:
    _rollout(extras={"judge": ["a", "b"]}).save(tmp_path / "deep" / "down" / "r")
    folder = tmp_path / "deep" / "down" / "r"
    assert sorted(path.name for path in folder.iterdir()) == ["rollout.json", "rows.jsonl", "tensors.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["r"]
    assert json.loads((folder / "rollout.json").read_text())["version"] == 1
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["max_turns", "error"]
    assert [line["extras"] for line in lines] == [{"judge": "a"}, {"judge": "b"}]
    assert safetensors.torch.load_file(folder / "tensors.safetensors")["prompt_ids"].tolist() == [1, 2, 3, 4]


def test_saving_again_replaces_the_old_rollout(tmp_path: Path) -> None:
    _rollout().save(tmp_path / "r")
    _rollout(texts=["new", "er"]).save(tmp_path / "r")
    assert Rollout.load(tmp_path / "r").texts == ["new", "er"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    _rollout().save(tmp_path / "r")
    assert len(Rollout.load(tmp_path / "r")) == 2


def test_saving_never_removes_what_is_no_rollout(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for name in ("thesis", "file"):
        with pytest.raises(RolloutError, match="must be a new folder or a saved rollout, got something else"):
            _rollout().save(tmp_path / name)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "text"


def test_a_failure_while_writing_leaves_the_old_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _rollout().save(tmp_path / "r")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        _rollout(texts=["new", "er"]).save(tmp_path / "r")
    monkeypatch.undo()
    assert Rollout.load(tmp_path / "r").texts == ["x", "y"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_failure_while_moving_puts_the_old_rollout_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _rollout().save(tmp_path / "r")
    rename = Path.rename

    def fails_for_the_new_one(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(OSError, match="disk gone"):
        _rollout(texts=["new", "er"]).save(tmp_path / "r")
    monkeypatch.undo()
    assert Rollout.load(tmp_path / "r").texts == ["x", "y"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def _edit_header(folder: Path, **changes: Any) -> None:
    header = json.loads((folder / "rollout.json").read_text())
    (folder / "rollout.json").write_text(json.dumps(header | changes))


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "rollout.json").unlink(), r"rollout\.json must be readable"),
        (lambda folder: (folder / "tensors.safetensors").unlink(), "tensors.safetensors must be readable"),
        (lambda folder: (folder / "rows.jsonl").unlink(), "rows.jsonl must be readable"),
        (lambda folder: (folder / "rollout.json").write_text("{"), "rollout.json must be JSON"),
        (lambda folder: (folder / "rollout.json").write_text("[]"), 'must say "format": "rlhf.rollout"'),
        (lambda folder: (folder / "rollout.json").write_bytes(b"\xff\xfe\x00"), "rollout.json must be JSON"),
        (lambda folder: _edit_header(folder, format="other"), 'must say "format": "rlhf.rollout"'),
        (lambda folder: _edit_header(folder, version=2), "must be of format version 1, got 2; load it with the rlhf that wrote it"),
        (lambda folder: _edit_header(folder, extras=None), "must list extras and sha256"),
        (lambda folder: _edit_header(folder, rows=3), "does not hold a consistent rollout: rows must agree in all files, got 3, 2 and 2"),
        (lambda folder: _edit_header(folder, extras={"gone": "tensor"}), "is not a whole rollout: 'extras.gone' is missing"),
        (lambda folder: _edit_header(folder, extras={"gone": "list"}), "is not a whole rollout: 'gone' is missing"),
        (lambda folder: _flip_a_byte(folder / "tensors.safetensors"), "tensors.safetensors must match the checksum"),
        (lambda folder: _flip_a_byte(folder / "rows.jsonl"), "rows.jsonl must match the checksum"),
        (lambda folder: os.truncate(folder / "tensors.safetensors", 40), "tensors.safetensors must match the checksum"),
        (lambda folder: _edit_header(folder, sha256={}), "must match the checksum"),
    ],
)
def test_a_damaged_folder_says_which_file_is_wrong(damage: Any, message: str, tmp_path: Path) -> None:
    _rollout().save(tmp_path / "r")
    damage(tmp_path / "r")
    with pytest.raises(RolloutError, match=message):
        Rollout.load(tmp_path / "r")


def test_loading_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"must be a folder that Rollout\.save wrote, got nothing there"):
        Rollout.load(tmp_path / "r")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RolloutError, match="got a file"):
        Rollout.load(tmp_path / "file")


def _replace(folder: Path, name: str, content: bytes) -> None:
    """Another file with a checksum that agrees, as an attacker would write it."""
    (folder / name).write_bytes(content)
    sha256 = json.loads((folder / "rollout.json").read_text())["sha256"]
    _edit_header(folder, sha256=sha256 | {name: hashlib.sha256(content).hexdigest()})


def test_well_formed_files_that_contradict_each_other_do_not_load(tmp_path: Path) -> None:
    _rollout().save(tmp_path / "r")
    tensors = safetensors.torch.load_file(tmp_path / "r" / "tensors.safetensors")
    tensors["response_mask"] = torch.ones(2, 4, dtype=torch.bool)
    _replace(tmp_path / "r", "tensors.safetensors", safetensors.torch.save(tensors))
    with pytest.raises(RolloutError, match=r"does not hold a consistent rollout: response_mask must be bool \[2, 3\]"):
        Rollout.load(tmp_path / "r")


@pytest.mark.parametrize("name", ["tensors.safetensors", "rows.jsonl"])
def test_loading_runs_no_code_from_the_folder(name: str, tmp_path: Path) -> None:
    _rollout().save(tmp_path / "r")
    trace = tmp_path / "ran"
    _replace(tmp_path / "r", name, b"cos\nsystem\n(S'touch " + str(trace).encode() + b"'\ntR.")
    with pytest.raises(RolloutError, match=f"{name} must be"):
        Rollout.load(tmp_path / "r")
    assert not trace.exists()

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from rlhf.data.sources import (
    clean_ground_truth,
    normalise_rows,
    read_dataset,
    read_jsonl,
    read_parquet,
    read_rows,
    write_parquet,
)
from rlhf.errors import DataError, RLHFWarning


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_lines(path, *lines: str):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# Reading files


def test_parquet_gives_native_lists_and_dicts(tmp_path):
    path = write_parquet([{"prompt": chat("hi"), "ground_truth": "1"}], tmp_path / "a.parquet")
    (row,) = read_parquet(path)
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "ground_truth": "1"}
    assert type(row["prompt"]) is list
    assert type(row["prompt"][0]) is dict
    assert type(row["prompt"][0]["content"]) is str


def test_numpy_arrays_of_dicts_become_lists_all_the_way_down():
    prompt = np.array([{"role": "user", "content": np.str_("hi")}], dtype=object)
    (row,) = read_rows([{"prompt": prompt, "scores": np.array([[1, 2]]), "index": np.int64(3)}])
    assert row == {"prompt": [{"role": "user", "content": "hi"}], "scores": [[1, 2]], "index": 3}
    assert type(row["prompt"]) is list
    assert type(row["prompt"][0]["content"]) is str
    assert type(row["index"]) is int


def test_parquet_files_whose_schemas_differ_are_read_one_after_the_other(tmp_path):
    first = write_parquet([{"prompt": "a", "extra_info": {"index": "x7"}}], tmp_path / "a.parquet")
    second = write_parquet([{"prompt": "b", "extra_info": {"index": 7}}], tmp_path / "b.parquet")
    assert [row["extra_info"]["index"] for row in read_parquet([first, second])] == ["x7", 7]


def test_a_nested_parquet_in_many_chunks_is_read_whole_and_in_order(tmp_path):
    import pyarrow.parquet

    source = write_parquet([{"prompt": chat(str(i))} for i in range(3000)], tmp_path / "one.parquet")
    table = pyarrow.parquet.read_table(source)
    chunked = tmp_path / "many.parquet"
    pyarrow.parquet.write_table(table, chunked, row_group_size=100)
    assert [row["prompt"][0]["content"] for row in read_parquet(chunked)] == [str(i) for i in range(3000)]


def test_json_lines_keep_text_that_looks_like_a_date_or_a_number(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", '{"ground_truth": "2021-01-01"}', "", '{"ground_truth": "007"}')
    assert read_jsonl(path) == [{"ground_truth": "2021-01-01"}, {"ground_truth": "007"}]


def test_json_lines_with_a_byte_order_mark_and_line_separators_inside_text_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode())
    assert read_jsonl(path) == [{"prompt": "a\u2028b"}, {"prompt": "c"}]


@pytest.mark.parametrize(
    "line, complaint",
    [("{'prompt': 1}", "line 2: expected a JSON object"), ("[1, 2]", "line 2: expected a JSON object, got a list")],
)
def test_a_line_that_is_no_json_object_is_named(tmp_path, line, complaint):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "a"}', line)
    with pytest.raises(DataError, match=complaint):
        read_jsonl(path)


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: expected a JSON object in UTF-8"):
        read_jsonl(path)


def test_a_missing_file_a_folder_and_an_empty_list_are_refused(tmp_path):
    with pytest.raises(DataError, match="found nothing"):
        read_parquet(tmp_path / "none.parquet")
    with pytest.raises(DataError, match="found a folder"):
        read_jsonl([tmp_path])
    with pytest.raises(DataError, match="empty list"):
        read_parquet([])


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.parquet", '{"prompt": "a"}')
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_parquet(path)


@pytest.mark.parametrize("read, kind", [(read_parquet, "parquet"), (read_jsonl, "json")])
def test_paths_with_a_scheme_go_to_datasets_unchanged(monkeypatch, read, kind):
    import datasets

    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(["s3://bucket/x-*.file", "hdfs://node:9000/y.file"]) == [{"prompt": "a"}] * 2
    assert calls == [
        ((kind,), {"data_files": "s3://bucket/x-*.file", "split": "train"}),
        ((kind,), {"data_files": "hdfs://node:9000/y.file", "split": "train"}),
    ]


def test_remote_json_whose_text_was_read_as_dates_is_refused(monkeypatch):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": "a", "ground_truth": datetime.datetime(2021, 1, 1)}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    with pytest.raises(DataError, match=r"column 'ground_truth' was read as dates"):
        read_jsonl("s3://bucket/a.jsonl")


def test_a_dataset_gives_its_rows_whatever_its_format_and_order():
    import datasets

    dataset = datasets.Dataset.from_list([{"prompt": chat("a")}, {"prompt": chat("b")}, {"prompt": chat("c")}])
    rows = read_dataset(dataset.with_format("numpy").select([2, 0]))
    assert rows == [{"prompt": chat("c")}, {"prompt": chat("a")}]
    assert read_dataset(dataset.to_iterable_dataset()) == read_dataset(dataset)


def test_a_dict_of_splits_is_refused_with_the_name_of_one():
    import datasets

    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])})
    with pytest.raises(DataError, match=r"pass dataset\['train'\]"):
        read_dataset(splits)


def test_rows_that_are_no_dicts_are_refused():
    with pytest.raises(DataError, match="row 1: expected a dict, got str"):
        read_rows([{"prompt": "a"}, "b"])
    with pytest.raises(DataError, match="rows must be a list of dicts, got str"):
        read_rows("train.parquet")


def test_a_data_frame_is_refused_with_advice():
    import pandas

    with pytest.raises(DataError, match="to_dict"):
        read_rows(pandas.DataFrame({"prompt": ["a"]}))


# Writing


def test_writing_casts_ground_truths_to_text_and_reading_accepts_both(tmp_path):
    flat = write_parquet([{"prompt": "a", "ground_truth": 1}, {"prompt": "b", "ground_truth": "2"}], tmp_path / "flat.parquet")
    nested = [{"prompt": "a", "reward_model": {"ground_truth": 1}}, {"prompt": "b", "reward_model": {"ground_truth": "2"}}]
    assert [row["ground_truth"] for row in read_parquet(flat)] == ["1", "2"]
    assert [row["reward_model"]["ground_truth"] for row in read_parquet(write_parquet(nested, tmp_path / "nested.parquet"))] == ["1", "2"]
    assert [row["ground_truth"] for row in normalise_rows(nested)] == ["1", "2"]


def test_writing_keeps_columns_that_only_later_rows_have(tmp_path):
    path = write_parquet([{"prompt": "a"}, {"prompt": "b", "level": 5}], tmp_path / "a.parquet")
    assert read_parquet(path) == [{"prompt": "a", "level": None}, {"prompt": "b", "level": 5}]


def test_a_column_of_several_types_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(DataError, match="give every column one type"):
        write_parquet([{"prompt": "a", "level": 1}, {"prompt": "b", "level": "two"}], tmp_path / "a.parquet")
    with pytest.raises(DataError, match="at least one row"):
        write_parquet([], tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


# One schema


def test_the_flat_schema_and_verls_give_the_same_row():
    flat = {"prompt": chat("2+2?"), "ground_truth": 4, "data_source": "math"}
    verl = {"prompt": chat("2+2?"), "data_source": "math", "ability": None, "reward_model": {"style": "rule", "ground_truth": "4"}}
    (one,), (other,) = normalise_rows([flat]), normalise_rows([verl])
    wanted = {"prompt": chat("2+2?"), "ground_truth": "4", "data_source": "math", "ability": "", "extra_info": {}}
    for row in one, other:
        assert {key: row[key] for key in wanted} == wanted
    assert one["uid"] == other["uid"]
    assert other["reward_model"] == {"style": "rule", "ground_truth": "4"}


def test_keys_can_be_renamed_and_enter_nested_dicts():
    rows = [{"question": "2+2?", "extra_info": {"answer": "4"}, "level": 3}]
    (row,) = normalise_rows(rows, prompt_key="question", ground_truth_key="extra_info.answer")
    assert (row["prompt"], row["ground_truth"], row["level"]) == ("2+2?", "4", 3)


def test_none_keys_of_padded_structs_are_stripped_from_messages():
    padded = [{"role": "user", "content": "hi", "name": None, "tool_calls": [{"arguments": {"x": 1, "y": None}}]}]
    (row,) = normalise_rows([{"prompt": padded}])
    assert row["prompt"] == [{"role": "user", "content": "hi", "tool_calls": [{"arguments": {"x": 1}}]}]


@pytest.mark.parametrize(
    "gold, cleaned",
    [
        ("\ufeff42\u200b", "42"),
        (" 42\n", "42"),
        ("\u200b 42 \u2060\u200b", "42"),
        ("007", "007"),
        (7, "7"),
        (0.5, "0.5"),
        ("a\u200bb", "a\u200bb"),
    ],
)
def test_ground_truths_become_text_without_what_surrounds_them(gold, cleaned):
    assert clean_ground_truth(gold) == cleaned


def test_structured_ground_truths_stay_as_they_are():
    assert clean_ground_truth({"inputs": ["1\n"]}) == {"inputs": ["1\n"]}
    assert clean_ground_truth([" a "]) == [" a "]


def test_extra_info_that_is_missing_or_null_is_an_empty_dict():
    rows = normalise_rows([{"prompt": "a"}, {"prompt": "b", "extra_info": None}, {"prompt": "c", "extra_info": {"index": "1"}}])
    assert [row["extra_info"] for row in rows] == [{}, {}, {"index": "1"}]


def test_extra_info_of_another_type_is_refused():
    with pytest.raises(DataError, match="row 0: key 'extra_info' must be a dict, got str"):
        normalise_rows([{"prompt": "a", "extra_info": "{}"}])


def test_a_missing_prompt_is_named_by_row_and_key():
    with pytest.raises(DataError, match=r"row 1: key 'prompt' is missing; it has question, ground_truth; name another with prompt_key="):
        normalise_rows([{"prompt": "a", "ground_truth": "1"}, {"question": "b", "ground_truth": "2"}])
    with pytest.raises(DataError, match=r"row 0: key 'prompt' is null"):
        normalise_rows([{"prompt": None}])


def test_a_renamed_ground_truth_that_is_missing_is_named():
    with pytest.raises(DataError, match=r"row 1: key 'answer' is missing; it has prompt; name another with ground_truth_key="):
        normalise_rows([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], ground_truth_key="answer")


def test_a_data_source_has_a_ground_truth_in_all_of_its_rows_or_in_none():
    rows = [{"prompt": "a", "data_source": "math", "ground_truth": "1"}, {"prompt": "b", "data_source": "chat"}]
    assert [row["ground_truth"] for row in normalise_rows(rows)] == ["1", None]
    with pytest.raises(DataError, match="row 2: key 'ground_truth' is missing, though other rows of data_source 'math'"):
        normalise_rows([*rows, {"prompt": "c", "data_source": "math"}])


def test_two_ground_truths_that_differ_are_refused():
    row = {"prompt": "a", "ground_truth": "1", "reward_model": {"ground_truth": "2"}}
    with pytest.raises(DataError, match=r"row 0: 'ground_truth' is '1' but 'reward_model\.ground_truth' is '2'"):
        normalise_rows([row])
    assert normalise_rows([row], ground_truth_key="reward_model.ground_truth")[0]["ground_truth"] == "2"


@pytest.mark.parametrize("broken", [{"prompt": "bad \ud83d"}, {"prompt": "a", "extra_info": {"notes": ["\udc00"]}}])
def test_a_lone_surrogate_is_refused_with_row_and_key(broken):
    with pytest.raises(DataError, match=f"row 1: key '{list(broken)[-1]}' holds a lone surrogate"):
        normalise_rows([{"prompt": "\U0001f600"}, broken])


def test_a_lone_surrogate_escaped_in_json_is_refused_too(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", r'{"prompt": "bad \ud83d surrogate"}')
    with pytest.raises(DataError, match="row 0: key 'prompt' holds a lone surrogate"):
        normalise_rows(read_jsonl(path))


# uids


def test_uids_do_not_depend_on_the_order_of_rows_even_among_equal_prompts():
    rows = [{"prompt": "a", "ground_truth": "1", "extra_info": {"index": i}} for i in range(3)] + [{"prompt": "b", "ground_truth": "2"}]
    forward, backward = normalise_rows(rows), normalise_rows(rows[::-1])[::-1]
    assert [row["uid"] for row in forward] == [row["uid"] for row in backward]
    assert len({row["uid"] for row in forward}) == 4


def test_uids_are_the_same_from_every_source(tmp_path):
    import datasets

    rows = [{"prompt": chat("a"), "ground_truth": 1}, {"prompt": [{"role": "user", "content": "b", "name": "x"}], "ground_truth": 2}]
    lines = write_lines(tmp_path / "a.jsonl", *map(json.dumps, rows))
    sources = [
        rows,
        read_jsonl(lines),
        read_parquet(write_parquet(rows, tmp_path / "a.parquet")),
        read_dataset(datasets.Dataset.from_list(rows)),
    ]
    assert len({tuple(row["uid"] for row in normalise_rows(source)) for source in sources}) == 1


def test_a_uid_never_changes_between_versions():
    (row,) = normalise_rows([{"prompt": "2+2=", "ground_truth": "4"}])
    assert row["uid"] == "c33f869c2af32607-0"


def test_given_uids_are_kept_as_text_and_repeated_ones_replaced_with_a_warning():
    rows = [{"prompt": "a", "uid": 7}, {"prompt": "b", "uid": "x"}, {"prompt": "c", "uid": "x"}, {"prompt": "d"}]
    with pytest.warns(RLHFWarning, match="uid 'x' names 2 rows"):
        uids = [row["uid"] for row in normalise_rows(rows)]
    assert uids[0] == "7"
    assert "x" not in uids
    assert len(set(uids)) == 4


def test_the_rows_that_were_passed_in_are_left_alone():
    row = {"prompt": [{"role": "user", "content": "hi", "name": None}], "ground_truth": 1}
    normalise_rows([row])
    assert row == {"prompt": [{"role": "user", "content": "hi", "name": None}], "ground_truth": 1}

"""Rows come in: parquet, JSON lines, a `datasets.Dataset` or plain dicts become native Python rows of one schema.

pandas is nowhere used: it turns list columns into numpy arrays, which no chat template understands. JSON lines are parsed line by
line with `json`, since type inference over a column turns text like "2021-01-01" into dates.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, RLHFWarning

Row = dict[str, Any]
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# What str.strip() leaves around a text although it shows nothing: byte-order mark, zero-width blanks and joiners.
INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060"


def read_parquet(paths: Paths) -> list[Row]:
    """All rows of one or several parquet files, in order, as native Python values.

    A path with a scheme (`hdfs://`, `s3://`, `https://`) goes to `datasets.load_dataset("parquet", data_files=path)` as it is. Local
    files are read on their own, so their schemas may differ (`extra_info.index` text in one, a number in another).

    Raises:
        DataError: there is no such file, or it is not parquet.
    """
    rows: list[Row] = []
    for path in _path_list(paths):
        rows.extend(_read_remote("parquet", path) if "://" in path else _read_local_parquet(path))
    return rows


def read_jsonl(paths: Paths) -> list[Row]:
    """All rows of one or several files of JSON lines, in order; blank lines are skipped. Text stays text, whatever it looks like.

    A path with a scheme goes to `datasets.load_dataset("json", data_files=path)` as it is. That guesses types; where it made a date
    of a text, which cannot be undone, the file is refused.

    Raises:
        DataError: there is no such file, or a line is not a JSON object; names file and line.
    """
    rows: list[Row] = []
    for path in _path_list(paths):
        rows.extend(_read_remote("json", path) if "://" in path else _read_local_jsonl(path))
    return rows


def read_dataset(dataset: Any) -> list[Row]:
    """The rows of a `datasets.Dataset` (whatever its format) or of a finite `datasets.IterableDataset`.

    Raises:
        DataError: it is a `DatasetDict`, of which one split must be picked, or no dataset at all.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"expected one split of a dataset, got a dict of {', '.join(map(str, dataset))}; pass dataset[{next(iter(dataset), '')!r}]"
        )
    if hasattr(dataset, "to_list"):
        return read_rows(dataset.to_list())
    return read_rows(dataset)


def read_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Copies of the rows with native Python values all the way down (numpy arrays become lists, numpy numbers numbers).

    Raises:
        DataError: something in `rows` is not a mapping.
    """
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DataError(f"rows must be a list of dicts, got {type(rows).__name__}; read a file with from_parquet or from_jsonl")
    native_rows = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            hint = "; pass frame.to_dict('records') for a data frame" if hasattr(rows, "columns") else ""
            raise DataError(f"row {index}: expected a dict, got {type(row).__name__}{hint}")
        native_rows.append(_native(row))
    return native_rows


def write_parquet(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Writes rows as parquet, every ground truth as text (a parquet column has one type), and returns the path.

    The file appears whole or not at all: it is written beside its place and then moved there.

    Raises:
        DataError: there are no rows, or the values of a column do not fit one type.
    """
    import pyarrow
    import pyarrow.parquet

    table_rows = [_with_text_ground_truth(row) for row in read_rows(rows)]
    if not table_rows:
        raise DataError(f"expected at least one row to write to {path}, got none")
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    # from_pylist takes its columns from the first row alone, and would drop what only later rows have.
    columns = {key: [row.get(key) for row in table_rows] for key in dict.fromkeys(key for row in table_rows for key in row)}
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns), partial)
    except pyarrow.ArrowException as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"the rows do not fit a parquet table ({error}); give every column one type, or write JSON lines") from error
    os.replace(partial, target)
    return target


def normalise_rows(rows: Iterable[Mapping[str, Any]], *, prompt_key: str = "prompt", ground_truth_key: str = "ground_truth") -> list[Row]:
    """Rows of the flat schema or of verl's in one form, with the keys below and whatever else was there.

    - prompt: as it was; in chat messages, keys that are None (padding of struct columns) are gone.
    - ground_truth: numbers become text; blanks, byte-order mark and zero-width characters around it are stripped. Without a flat
      `ground_truth`, `reward_model.ground_truth` is taken. None if all rows of that data_source lack it (a reward model needs none).
    - data_source, ability: text, "" if missing. extra_info: a dict, {} if missing.
    - uid: text, unique. One that is given is kept; a missing or repeated one is made of the hash of prompt, ground truth and
      data_source, and of the occurrence among equals, so that it does not depend on the order of rows.

    Args:
        rows: the rows as read.
        prompt_key, ground_truth_key: where to find the two; a dot enters a nested dict (`"extra_info.question"`).

    Raises:
        DataError: a row lacks a key, holds a lone surrogate (text that no file and no tokenizer can hold), or contradicts itself;
            names row (from 0) and key.
    """
    normalised = [_normalise(index, row, prompt_key, ground_truth_key) for index, row in enumerate(read_rows(rows))]
    sources_with_truth = {row["data_source"] for row in normalised if row["ground_truth"] is not None}
    for index, row in enumerate(normalised):
        if row["ground_truth"] is None and row["data_source"] in sources_with_truth:
            raise DataError(
                f"row {index}: key {ground_truth_key!r} is missing, though other rows of data_source {row['data_source']!r} have it; "
                f"add it, or give rows without one a data_source of their own"
            )
    _assign_uids(normalised)
    return normalised


def clean_ground_truth(value: Any) -> Any:
    """A ground truth as verifiers get it: text without blanks or invisible characters around it; lists, dicts and None as they are.

    >>> clean_ground_truth("\\ufeff 42\\u200b"), clean_ground_truth(7), clean_ground_truth("007")
    ('42', '7', '007')
    """
    if value is None or isinstance(value, (list, dict)):
        return value
    text = str(value)
    while (stripped := text.strip().strip(INVISIBLE)) != text:
        text = stripped
    return text


def strip_none(value: Any) -> Any:
    """The value without dict entries that are None, at any depth: struct columns pad each row with the keys of all others."""
    if isinstance(value, Mapping):
        return {key: strip_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [strip_none(entry) for entry in value]
    return value


def _path_list(paths: Paths) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Iterable):
        raise DataError(f"expected a path or a list of paths, got {type(paths).__name__}")
    names = [os.fspath(path) for path in paths]
    if not names:
        raise DataError("expected a path or a list of paths, got an empty list")
    for name in names:
        if "://" not in name and not os.path.isfile(name):
            raise DataError(
                f"expected a file at {name!r}, found {'a folder' if os.path.isdir(name) else 'nothing'}; pass a file or a list of files"
            )
    return names


def _read_remote(kind: str, path: str) -> list[Row]:
    import datasets

    dataset = datasets.load_dataset(kind, data_files=path, split="train")
    if kind == "json":
        guessed = [name for name, feature in dataset.features.items() if "timestamp[" in str(feature)]
        if guessed:
            raise DataError(
                f"{path}: text in column {guessed[0]!r} was read as dates; copy the file to a local disk, or store it as parquet"
            )
    return read_dataset(dataset)


def _read_local_parquet(path: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # Batch by batch: reading a large nested column in one piece is not implemented in Arrow.
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet ({error}); use from_jsonl for JSON lines") from error


def _read_local_jsonl(path: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else {}
            except ValueError as error:
                raise DataError(f"{path}, line {number}: expected a JSON object in UTF-8, got {line[:60]!r} ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected a JSON object, got a {type(row).__name__}; write one row a line")
            if text:
                yield row


def _native(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _native(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_native(entry) for entry in value]
    # numpy arrays and numbers, without importing numpy: both have tolist(); torch tensors have it too and stay as they are.
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _native(value.tolist())
    return value


def _with_text_ground_truth(row: Row) -> Row:
    row = dict(row)
    if "ground_truth" in row:
        row["ground_truth"] = clean_ground_truth(row["ground_truth"])
    nested = row.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        row["reward_model"] = {**nested, "ground_truth": clean_ground_truth(nested["ground_truth"])}
    return row


def _normalise(index: int, row: Row, prompt_key: str, ground_truth_key: str) -> Row:
    for key, value in row.items():
        if _has_lone_surrogate(value):
            raise DataError(
                f"row {index}: key {key!r} holds a lone surrogate, half of a character; mend the text, or replace it with U+FFFD"
            )
    prompt = _lookup(row, prompt_key)
    if prompt is None:
        raise _missing(index, prompt_key, row, "prompt_key")
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"row {index}: key 'extra_info' must be a dict, got {type(extra_info).__name__}; leave it out if there is none")
    return {
        **row,
        "prompt": prompt if isinstance(prompt, str) else strip_none(prompt),
        "ground_truth": _ground_truth(index, row, ground_truth_key),
        "data_source": _text_or_empty(row.get("data_source")),
        "ability": _text_or_empty(row.get("ability")),
        "extra_info": extra_info or {},
    }


def _ground_truth(index: int, row: Row, ground_truth_key: str) -> Any:
    flat = clean_ground_truth(_lookup(row, ground_truth_key))
    if ground_truth_key != "ground_truth":
        if flat is None:
            raise _missing(index, ground_truth_key, row, "ground_truth_key")
        return flat
    nested = clean_ground_truth(_lookup(row, "reward_model.ground_truth"))
    if flat is not None and nested is not None and flat != nested:
        raise DataError(
            f"row {index}: 'ground_truth' is {flat!r} but 'reward_model.ground_truth' is {nested!r}; "
            f"remove one, or choose with ground_truth_key='reward_model.ground_truth'"
        )
    return nested if flat is None else flat


def _lookup(row: Row, key: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _missing(index: int, key: str, row: Row, argument: str) -> DataError:
    has = ", ".join(map(str, row)) or "no keys"
    state = "is null" if key in row else "is missing"
    return DataError(f"row {index}: key {key!r} {state}; it has {has}; name another with {argument}=")


def _text_or_empty(value: Any) -> str:
    return "" if value is None else str(value)


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False
    if isinstance(value, dict):
        return any(_has_lone_surrogate(key) or _has_lone_surrogate(entry) for key, entry in value.items())
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def _assign_uids(rows: list[Row]) -> None:
    given = Counter(str(row["uid"]) for row in rows if row.get("uid") is not None)
    if repeated := [uid for uid, count in given.items() if count > 1]:
        warnings.warn(
            f"uid {repeated[0]!r} names {given[repeated[0]]} rows ({len(repeated)} such uids); these rows get uids made of their content",
            RLHFWarning,
            stacklevel=2,
        )
    unnamed: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.get("uid") is not None and given[str(row["uid"])] == 1:
            row["uid"] = str(row["uid"])
        else:
            unnamed[_digest([row["prompt"], row["ground_truth"], row["data_source"]])].append(index)
    for digest, members in unnamed.items():
        if len(members) > 1:
            members.sort(key=lambda index: _digest(rows[index]))
        for occurrence, index in enumerate(members):
            rows[index]["uid"] = f"{digest}-{occurrence}"


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{key!s}:{_canonical(entry)}" for key, entry in value.items() if entry is not None)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(value, default=repr)

"""A rollout on disk: a folder that any language can read, and that runs no code when it is loaded.

    rollout.json         format, version, counts, the kind of each extra, and the SHA-256 of the other two files
    tensors.safetensors  all tensors; prompts as one row of ids with their lengths; extras under "extras.<name>"
    rows.jsonl           one line per response: dataset row, texts, finish reason, extras that are lists

The folder is written beside its place and renamed into it, so a kill leaves the old rollout or the new one, never a half (in the instant
between two renames the old one lies beside it under a hidden name).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rlhf.errors import RolloutError
from rlhf.rollout.batch import FinishReason, Rollout

FORMAT = "rlhf.rollout"
VERSION = 1
_HEADER, _TENSORS, _ROWS = "rollout.json", "tensors.safetensors", "rows.jsonl"
_FIELDS = ("response_ids", "lengths", "response_mask", "temperature", "filtered", "group", "episode", "weight_version")


def save_rollout(rollout: Rollout, path: str | os.PathLike[str]) -> None:
    """Write the rollout to the folder `path`; a rollout that is there already is replaced.

    Rows and list extras must be what JSON can hold (tuples come back as lists, numpy numbers as plain ones; NaN and lone surrogates
    survive). Ids, masks, log-probabilities and tensor extras come back bit for bit.

    Raises:
        RolloutError: a value cannot be JSON, or something other than a rollout is at `path`.
    """
    target = Path(path)
    if (target.exists() or target.is_symlink()) and not _replaceable(target):
        raise RolloutError(f"{target} must be a new folder or a saved rollout, got something else; choose another path, or remove it first")
    tensors = {name: getattr(rollout, name) for name in _FIELDS}
    tensors["prompt_ids"] = torch.cat([*rollout.prompt_ids, torch.zeros(0, dtype=torch.int64)])
    tensors["prompt_lengths"] = torch.tensor([len(ids) for ids in rollout.prompt_ids], dtype=torch.int64)
    if rollout.logprobs is not None:
        tensors["logprobs"] = rollout.logprobs
    lists = {name: value for name, value in rollout.extras.items() if isinstance(value, list)}
    tensors |= {f"extras.{name}": value for name, value in rollout.extras.items() if isinstance(value, Tensor)}
    payload = safetensors.torch.save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    lines = "".join(_line(rollout, lists, i) for i in range(len(rollout))).encode("ascii")
    header = {
        "format": FORMAT,
        "version": VERSION,
        "rows": len(rollout),
        "width": rollout.response_ids.shape[1],
        "logprobs": rollout.logprobs is not None,
        "extras": {name: "list" if name in lists else "tensor" for name in rollout.extras},
        "sha256": {_TENSORS: hashlib.sha256(payload).hexdigest(), _ROWS: hashlib.sha256(lines).hexdigest()},
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new-{uuid.uuid4().hex}")
    fresh.mkdir()
    try:
        for name, content in ((_TENSORS, payload), (_ROWS, lines), (_HEADER, json.dumps(header, indent=1).encode("ascii"))):
            _write(fresh / name, content)
        _move_into_place(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_rollout(path: str | os.PathLike[str]) -> Rollout:
    """Read a saved rollout.

    Raises:
        RolloutError: nothing is there, the format is another or newer one, a file is missing or damaged, or parts contradict each other.
    """
    folder = Path(path)
    header = _read_header(folder)
    tensors = _read_tensors(folder, header)
    lines = _read_lines(folder, header)
    try:
        lengths = tensors["prompt_lengths"]
        if int(lengths.sum()) != len(tensors["prompt_ids"]) or len(lengths) != len(lines) or len(lines) != header["rows"]:
            raise RolloutError(f"rows must agree in all files, got {header['rows']}, {len(lengths)} and {len(lines)}")
        kinds: dict[str, str] = header["extras"]
        return Rollout(
            prompt_ids=[ids.clone() for ids in tensors["prompt_ids"].split(lengths.tolist())] if len(lengths) else [],
            logprobs=tensors["logprobs"] if header["logprobs"] else None,
            finish_reasons=[FinishReason(line["finish_reason"]) for line in lines],
            rows=[line["row"] for line in lines],
            texts=[line["text"] for line in lines],
            raw_texts=[line["raw_text"] for line in lines],
            extras={
                name: tensors[f"extras.{name}"] if kind == "tensor" else [line["extras"][name] for line in lines]
                for name, kind in kinds.items()
            },
            **{name: tensors[name] for name in _FIELDS},
        )
    except KeyError as error:
        raise RolloutError(f"{folder} is not a whole rollout: {error} is missing; save it again") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise RolloutError(f"{folder} does not hold a consistent rollout: {error}") from error


def _replaceable(target: Path) -> bool:
    return target.is_dir() and not target.is_symlink() and ((target / _HEADER).is_file() or not any(target.iterdir()))


def _line(rollout: Rollout, lists: Mapping[str, list[Any]], i: int) -> str:
    content = {
        "row": _plain(rollout.rows[i], f"rows[{i}]"),
        "text": rollout.texts[i],
        "raw_text": rollout.raw_texts[i],
        "finish_reason": rollout.finish_reasons[i].value,
        "extras": {name: _plain(values[i], f"extras[{name!r}][{i}]") for name, values in lists.items()},
    }
    return json.dumps(content) + "\n"  # ASCII with escapes, so that lone surrogates and line separators survive


def _plain(value: Any, where: str) -> Any:
    """The value as JSON knows it, or an error that says where it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RolloutError(f"{where} must have str keys to be saved as JSON, got the key {key!r}; write {str(key)!r}")
        return {key: _plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return _plain(value.tolist(), where)
    raise RolloutError(
        f"{where} must be text, numbers, None, lists or dicts to be saved as JSON, got {type(value).__name__}; convert it or drop it"
    )


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex}")
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _read_header(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise RolloutError(f"{folder} must be a folder that Rollout.save wrote, got {'a file' if folder.exists() else 'nothing there'}")
    try:
        header = json.loads(_read(folder / _HEADER))
    except ValueError as error:
        raise RolloutError(f"{folder / _HEADER} must be JSON, got {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RolloutError(f'{folder / _HEADER} must say "format": "{FORMAT}", got another file; is this a saved rollout?')
    if header.get("version") != VERSION:
        raise RolloutError(
            f"{folder} must be of format version {VERSION}, got {header.get('version')!r}; load it with the rlhf that wrote it"
        )
    if not isinstance(header.get("extras"), dict) or not isinstance(header.get("sha256"), dict):
        raise RolloutError(f"{folder / _HEADER} must list extras and sha256, got neither or one; save the rollout again")
    return header


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RolloutError(
            f"{path} must be readable, got {error.strerror or error}; a saved rollout is {_HEADER}, {_TENSORS} and {_ROWS}"
        ) from None


def _checked(folder: Path, name: str, header: Mapping[str, Any]) -> bytes:
    content = _read(folder / name)
    if hashlib.sha256(content).hexdigest() != header["sha256"].get(name):
        raise RolloutError(
            f"{folder / name} must match the checksum in {_HEADER}, got other bytes; the file is damaged or was edited: save it again"
        )
    return content


def _read_tensors(folder: Path, header: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(_checked(folder, _TENSORS, header))
    except safetensors.SafetensorError as error:
        raise RolloutError(f"{folder / _TENSORS} must be a safetensors file, got {error}") from None


def _read_lines(folder: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in _checked(folder, _ROWS, header).decode("ascii").split("\n") if line]
    except ValueError as error:
        raise RolloutError(f"{folder / _ROWS} must be JSON lines, got {error}") from None

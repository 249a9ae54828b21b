"""GSM8K, grade-school word problems with a number as answer, as rows and as parquet.

The rows have verl's schema, with its `data_source` "openai/gsm8k", so that files and rewards written for it work here and there.
Source of the data: Cobbe et al. 2021, arXiv:2110.14168; lines hold `question` and `answer`, which ends in `#### number`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhf.data.sources import Row, read_jsonl, read_parquet, write_parquet
from rlhf.errors import ConfigError, DataError

DATA_SOURCE = "openai/gsm8k"
DEFAULT_INSTRUCTION = 'Reason step by step. Then write "####" and the final number alone on the last line.'

_FINAL_NUMBER = re.compile(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)\s*$")


def load_gsm8k(
    path: str | os.PathLike[str],
    *,
    instruction: str = DEFAULT_INSTRUCTION,
    system_prompt: str | None = None,
    as_text: bool = False,
    split: str | None = None,
) -> list[Row]:
    """The problems of one GSM8K file, as rows for `PromptDataset`.

    Each row has data_source "openai/gsm8k", prompt (chat messages, or one text), ability "math", reward_model {style, ground_truth:
    the number after `####` as text, without commas} and extra_info {split, index, question, answer}.

    Args:
        path: `train.jsonl` or `test.jsonl`; a name ending in `.parquet` (columns question, answer) is read as such.
        instruction: what the model is told behind the question; "" for nothing.
        system_prompt: a system message before the question.
        as_text: plain text `Question: …` to `Answer:`, for models without a chat template.
        split: what extra_info calls the split; the file's name without its ending if None.

    Raises:
        DataError: a row lacks a key or its answer does not end in `#### number`; names the row, from 0.
        ConfigError: as_text with a system prompt, which plain text has no place for.
    """
    if as_text and system_prompt is not None:
        raise ConfigError("system_prompt needs chat messages, got as_text=True; put the text into instruction instead")
    read = read_parquet if os.fspath(path).endswith(".parquet") else read_jsonl
    split = Path(path).stem if split is None else split
    return [_row(index, raw, split, instruction, system_prompt, as_text) for index, raw in enumerate(read(path))]


def gsm8k_to_parquet(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    instruction: str = DEFAULT_INSTRUCTION,
    system_prompt: str | None = None,
    as_text: bool = False,
    split: str | None = None,
) -> Path:
    """Writes the rows of `load_gsm8k(source, ...)` as parquet, which `PromptDataset.from_parquet` reads; returns the target's path."""
    rows = load_gsm8k(source, instruction=instruction, system_prompt=system_prompt, as_text=as_text, split=split)
    return write_parquet(rows, target)


def gsm8k_ground_truth(answer: str) -> str | None:
    """The number after the last `####` of a GSM8K solution, as text without commas; None if the solution does not end in one.

    >>> gsm8k_ground_truth("48 + 1186 = 1234\\n#### 1,234")
    '1234'
    """
    match = _FINAL_NUMBER.search(answer)
    return match.group(1).replace(",", "") if match else None


def _row(index: int, raw: Row, split: str, instruction: str, system_prompt: str | None, as_text: bool) -> Row:
    for key in ("question", "answer"):
        if not isinstance(raw.get(key), str):
            raise DataError(f"row {index}: expected text under key {key!r}, got {raw.get(key)!r}; it has {', '.join(raw) or 'no keys'}")
    ground_truth = gsm8k_ground_truth(raw["answer"])
    if ground_truth is None:
        raise DataError(f"row {index}: key 'answer' must end in '#### number', got {raw['answer'][-40:]!r}; mend or remove the row")
    question = raw["question"].strip()
    request = f"{question}\n\n{instruction}" if instruction else question
    messages = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return {
        "data_source": DATA_SOURCE,
        "prompt": f"Question: {request}\nAnswer:" if as_text else [*messages, {"role": "user", "content": request}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "question": raw["question"], "answer": raw["answer"]},
    }

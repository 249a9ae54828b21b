"""A rollout to look at: one line, a table in a notebook, a data frame, a dataset."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import datasets
    import pandas

    from rlhf.rollout.batch import Rollout

SHOWN_ROWS = 5
SHOWN_CHARACTERS = 300


def one_line(rollout: Rollout) -> str:
    """Counts only, never the model's text, so that it stays one line."""
    reasons = ", ".join(f"{name}={count}" for name, count in sorted(Counter(reason.value for reason in rollout.finish_reasons).items()))
    versions = rollout.weight_version.unique().tolist()
    shown = "none" if not versions else str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    return (
        f"Rollout({len(rollout)} rows, {rollout.group.unique().numel()} groups, {int(rollout.response_mask.sum())} sampled tokens, "
        f"longest {int(rollout.lengths.max()) if len(rollout) else 0}, finish: {reasons or 'none'}, weight version {shown}"
        f"{', no log-probabilities' if rollout.logprobs is None else ''})"
    )


def html_table(rollout: Rollout) -> str:
    """The first rows as an HTML table; whatever the model or the data wrote is shown as text, never run."""
    head = "".join(f"<th>{title}</th>" for title in ("row", "group", "prompt", "response", "tokens", "finish"))
    body = []
    for i in range(min(len(rollout), SHOWN_ROWS)):
        prompt = _prompt_text(rollout, i, None)
        cells = [str(i), str(int(rollout.group[i])), "" if prompt is None else prompt, rollout.texts[i]]
        cells += [str(int(rollout.lengths[i])), rollout.finish_reasons[i].value]
        body.append("<tr>" + "".join(f'<td style="text-align:left;white-space:pre-wrap">{_cell(cell)}</td>' for cell in cells) + "</tr>")
    rest = len(rollout) - SHOWN_ROWS
    more = f"<p>and {rest} more rows</p>" if rest > 0 else ""
    return f"<div><p>{_cell(one_line(rollout))}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{more}</div>"


def to_pandas(rollout: Rollout, tokenizer: Any = None) -> pandas.DataFrame:
    """One line per response.

    Columns: prompt (decoded by the tokenizer, or the dataset row's own `prompt`, chats as JSON; None if neither is there), response,
    length (tokens), finish_reason, group, episode, weight_version, mean_logprob (over sampled tokens; NaN where there are none), then
    extras with one value per row, then the fields of the dataset rows. A field whose name is taken is called `row_<name>`, an extra
    `extra_<name>`.
    """
    import pandas

    columns = _columns(rollout, tokenizer)
    # Object columns, as pandas' own text type cannot hold lone surrogates.
    return pandas.DataFrame({name: pandas.Series(values, dtype=_dtype(values)) for name, values in columns.items()})


def to_dataset(rollout: Rollout, tokenizer: Any = None) -> datasets.Dataset:
    """The columns of `to_pandas`, and prompt_ids, response_ids, response_mask and logprobs as lists without padding.

    Fields that hold different types in different rows become JSON text; lone surrogates become U+FFFD, as Arrow takes valid text only.
    """
    import datasets
    import pyarrow

    columns = _columns(rollout, tokenizer)
    lengths = rollout.lengths.tolist()
    columns["prompt_ids"] = [ids.tolist() for ids in rollout.prompt_ids]
    columns["response_ids"] = [ids[:length].tolist() for ids, length in zip(rollout.response_ids, lengths, strict=True)]
    columns["response_mask"] = [mask[:length].tolist() for mask, length in zip(rollout.response_mask, lengths, strict=True)]
    if rollout.logprobs is not None:
        columns["logprobs"] = [values[:length].tolist() for values, length in zip(rollout.logprobs, lengths, strict=True)]
    arrays = {}
    for name, values in columns.items():
        valid = _valid_text(values)
        try:
            arrays[name] = pyarrow.array(valid)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError, OverflowError):
            arrays[name] = pyarrow.array([json.dumps(value, default=str) for value in valid])
    return datasets.Dataset(pyarrow.table(arrays))


def _columns(rollout: Rollout, tokenizer: Any) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "prompt": [_prompt_text(rollout, i, tokenizer) for i in range(len(rollout))],
        "response": list(rollout.texts),
        "length": rollout.lengths.tolist(),
        "finish_reason": [reason.value for reason in rollout.finish_reasons],
        "group": rollout.group.tolist(),
        "episode": rollout.episode.tolist(),
        "weight_version": rollout.weight_version.tolist(),
        "mean_logprob": _mean_logprobs(rollout),
    }
    reserved = {*columns, "prompt_ids", "response_ids", "response_mask", "logprobs"}
    for name, value in rollout.extras.items():
        if not isinstance(value, Tensor) or value.dim() == 1:
            columns[f"extra_{name}" if name in reserved else name] = value.tolist() if isinstance(value, Tensor) else list(value)
    reserved |= set(columns)
    for key in dict.fromkeys(key for row in rollout.rows for key in row):
        if key == "prompt" and tokenizer is None:
            continue  # the prompt column shows it
        columns[f"row_{key}" if key in reserved else str(key)] = [row.get(key) for row in rollout.rows]
    return columns


def _prompt_text(rollout: Rollout, i: int, tokenizer: Any) -> str | None:
    if tokenizer is not None:
        return str(tokenizer.decode(rollout.prompt_ids[i].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    prompt = rollout.rows[i].get("prompt")
    return prompt if prompt is None or isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)


def _mean_logprobs(rollout: Rollout) -> list[float]:
    if rollout.logprobs is None:
        return [math.nan] * len(rollout)
    total = rollout.logprobs.double().where(rollout.response_mask, 0.0).sum(dim=1)
    return (total / rollout.response_mask.sum(dim=1)).tolist()  # 0 / 0 is NaN: a row without sampled tokens has no mean


def _dtype(values: list[Any]) -> object:
    return None if values and all(isinstance(value, (bool, int, float)) for value in values) else object


def _cell(text: str) -> str:
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
    return html.escape(_valid_text(shown))


def _valid_text(value: Any) -> Any:
    """The value with lone surrogates replaced, also inside lists and dicts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_valid_text(key): _valid_text(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_valid_text(entry) for entry in value]
    return value

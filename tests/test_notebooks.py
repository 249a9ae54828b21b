"""The notebooks run from top to bottom in a kernel of their own, and come to what their text says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def _executed(notebook: Path, folder: Path, question: str) -> Any:
    """Run a notebook and then, in its kernel, print the value of the expression `question` as JSON; returns that value."""
    from nbclient import NotebookClient

    document = copy.deepcopy(nbformat.read(notebook, as_version=4))
    document.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({question}))"))
    NotebookClient(document, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return json.loads(document.cells[-1].outputs[-1].text)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_committed_without_outputs(notebook: Path) -> None:
    document = nbformat.read(notebook, as_version=4)
    nbformat.validate(document)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert code
    assert not [cell.id for cell in code if cell.outputs or cell.execution_count is not None]


@pytest.mark.slow
def test_the_first_run_learns_to_sort_by_grpo_and_by_ppo(tmp_path: Path) -> None:
    results = _executed(FOLDER / "01_first_run.ipynb", tmp_path, "results | {'lengths': [len(grpo_history), len(ppo_history)]}")
    assert results["lengths"] == [30, 30]
    assert results["start"]["greedy"] < 0.75
    for name in ("GRPO", "PPO"):
        # .97 and .89 when written; another machine's rounding may take another path
        assert results[name]["greedy"] > 0.9
        assert results[name]["sampled"] > results["start"]["sampled"] + 0.3


@pytest.mark.slow
def test_three_estimators_on_one_experience_differ_in_credit_and_agree_in_direction(tmp_path: Path) -> None:
    question = "{'credit': credit_to_alike, 'agreement': agreement, 'repeatability': repeatability, 'rows': len(rollout)}"
    found = _executed(FOLDER / "02_compare.ipynb", tmp_path, question)
    assert found["rows"] == 1600
    assert found["credit"]["GRPO"] == found["credit"]["Dr. GRPO"] == 0.0
    assert 0.1 < found["credit"]["GAE"] < 0.6  # .29 when written
    assert len(found["agreement"]) == 3
    assert min(found["agreement"].values()) > max(found["repeatability"].values())  # .99 and .81


@pytest.mark.slow
def test_an_error_in_a_notebook_fails_its_test(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    broken = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('broken on purpose')")]), broken)
    with pytest.raises(CellExecutionError, match="broken on purpose"):
        _executed(broken, tmp_path, "1")

"""It learns: the quickstart reaches its bar on three seeds, and with the sign of the advantage turned it unlearns."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import rlhf


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_and_grpo_learn_to_sort_from_the_reward_alone(quickstart: ModuleType, tmp_path: Path, seed: int) -> None:
    quickstart.main(["--seed", str(seed), "--out", str(tmp_path), "--quiet"])
    result = json.loads((tmp_path / "quickstart.json").read_text())
    assert result["start"]["greedy"] <= 0.65
    for algorithm in ("ppo", "grpo"):
        assert result[algorithm]["greedy"] >= 0.95
        assert result[algorithm]["sampled"] >= 0.80
    assert result["seconds"] > 0
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_with_the_sign_of_the_advantage_flipped_both_end_below_their_start(quickstart: ModuleType) -> None:
    tokenizer = quickstart.make_tokenizer()
    unseen = quickstart.make_rows(1000, seed=10_000)
    held_out = rlhf.PromptDataset(unseen, tokenizer)
    left_out = frozenset(row["prompt"][:-1] for row in unseen)
    prompts = rlhf.PromptDataset(quickstart.make_rows(20_000, 0, leave_out=left_out), tokenizer)
    start = quickstart.fine_tune(prompts, 0, progress=False)
    before = quickstart.measure(start, start, held_out)
    for train in (quickstart.run_ppo, quickstart.run_grpo):
        actor, _ = train(start, prompts, 0, sign=-1.0, progress=False)
        after = quickstart.measure(actor, start, held_out)
        assert after["greedy"] < before["greedy"] - 0.1
        assert after["sampled"] < before["sampled"] - 0.1

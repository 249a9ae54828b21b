"""Two and three real processes over gloo do what one does: same updates, no hang, one voice.

Promise 1 for several processes. One process with all the rows, run here, is the definition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf
from rlhf.errors import ConfigError
from tests import processes_worker

ROOT = Path(__file__).resolve().parents[1]


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = ("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes")


def launch(launcher: tuple[str, ...], count: int, script: Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *launcher, str(count), str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("processes")
    launch(TORCHRUN, request.param, ROOT / "tests" / "processes_worker.py", str(folder))
    found = {name: [torch.load(folder / f"{name}-{i}.pt") for i in range(request.param)] for name in processes_worker.CASES}
    assert all(part["processes"] == request.param for parts in found.values() for part in parts)
    found["file"] = [{"lines": [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]}]
    return found


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case, tolerance", [("ppo", 1e-10), ("ppo32", 1e-5), ("grpo", 1e-10), ("nothing", 1e-10)])
def test_an_update_is_that_of_one_process(results: dict[str, Any], case: str, tolerance: float) -> None:
    """Ragged rows, unequal shares, other numbers of micro-batches, groups that straddle, a row without a score, mini-batches of five."""
    alone = processes_worker.CASES[case]()
    for part in results[case]:
        assert largest_difference(part["weights"], alone["weights"]) < tolerance
        for name, value in alone["metrics"].items():
            assert part["metrics"][name] == pytest.approx(value, rel=1e-4 if case == "ppo32" else 1e-8, abs=1e-6), name
    start = processes_worker.weights(*processes_worker.models(torch.float64))[: len(alone["weights"])]
    assert largest_difference(start, alone["weights"]) > 100 * tolerance, "nothing was trained, so nothing was compared"


def test_group_advantages_are_those_of_one_process(results: dict[str, Any]) -> None:
    alone = processes_worker.CASES["grpo"]()["advantages"]
    for part in results["grpo"]:
        torch.testing.assert_close(part["advantages"], alone[part["rows"]], rtol=1e-10, atol=1e-12)


def test_the_kl_controller_hears_the_mean_over_all_processes(results: dict[str, Any]) -> None:
    alone = processes_worker.CASES["ppo"]()["kl_coef"]
    assert [part["kl_coef"] for part in results["ppo"]] == pytest.approx([alone] * len(results["ppo"]), rel=1e-9)


def test_a_gradient_that_is_not_finite_in_one_process_skips_the_step_in_all(results: dict[str, Any]) -> None:
    for part in results["not_finite"]:
        assert part["unchanged"]
        assert part["version"] == 0
        assert part["metrics"]["actor/skipped_steps"] == 1.0


def test_master_weights_stay_the_same_in_all_processes(results: dict[str, Any]) -> None:
    first, *others = results["bfloat16"]
    assert {parameter.dtype for parameter in first["masters"]} == {torch.float32}
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first["masters"], other["masters"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first["weights"], other["weights"], strict=True))


def test_every_process_samples_its_own_and_reports_what_all_did(results: dict[str, Any]) -> None:
    parts = results["loop"]
    assert len({tuple(part["texts"]) for part in parts}) == len(parts), "same seed, same samples in every process"
    for part in parts:
        assert [metrics["rollout/rows"] for metrics in part["history"]] == [12.0, 12.0]
        assert [metrics["reward/mean"] for metrics in part["history"]] == [metrics["reward/mean"] for metrics in parts[0]["history"]]
        assert [m["eval/all/mean"] for m in part["evaluations"]] == [m["eval/all/mean"] for m in parts[0]["evaluations"]]
        assert all(torch.equal(a, b) for a, b in zip(part["weights"], parts[0]["weights"], strict=True))


def test_one_process_writes_the_metrics_file(results: dict[str, Any]) -> None:
    lines = results["file"][0]["lines"]
    assert [line["step"] for line in lines if "reward/mean" in line] == [0.0, 1.0]


@pytest.mark.slow
def test_the_quickstart_learns_in_two_processes(tmp_path: Path) -> None:
    done = launch(ACCELERATE, 2, ROOT / "examples" / "quickstart.py", "--quiet", "--out", str(tmp_path), timeout=600)
    result = json.loads((tmp_path / "quickstart.json").read_text())
    assert result["processes"] == 2
    assert done.stdout.count("wrote ") == 1, "both processes wrote"
    for algorithm in ("ppo", "grpo"):
        assert result[algorithm]["greedy"] >= 0.95
        assert result[algorithm]["sampled"] >= 0.80


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 4}, {"mixed_precision": "bf16"}])
def test_what_the_learner_does_itself_is_not_asked_of_accelerate(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not accelerate's"):
        rlhf.make_accelerator(**options)


def test_processes_that_accelerate_does_not_see_are_an_error() -> None:
    program = (
        "import os, rlhf; os.environ['WORLD_SIZE'] = '1'; rlhf.make_accelerator(); os.environ['WORLD_SIZE'] = '2'; rlhf.make_accelerator()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode != 0
    assert "announced 2 processes and accelerate sees 1" in done.stderr

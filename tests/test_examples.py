"""The examples do what they print, in the number of lines they promise; the two large ones run on a random model and made-up data."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlhf
from tests.models import char_tokenizer, tiny_model
from tests.test_processes import TORCHRUN, launch

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
RUNNABLE = ("quickstart", "json_task", "gsm8k")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example by its name, as if its folder were the script's."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of random weights with its tokenizer, and twelve problems and four more in GSM8K's form."""
    tiny_model("llama", max_position_embeddings=512).save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, count in (("train", 12), ("test", 4)):
        rows = [{"question": f"{i} + {i}", "answer": f"add\n#### {2 * i}"} for i in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


def lines_of_code(path: Path, names: tuple[str, ...] = ()) -> int:
    """Lines with code, imports and docstrings apart; of these top-level functions and classes only, if any are named."""
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    chosen = [node for node in body if getattr(node, "name", None) in names] if names else body
    assert len(chosen) >= len(names)
    lines: set[int] = set()
    for node in chosen:
        for part in ast.walk(node):
            if isinstance(part, ast.stmt) and not isinstance(part, ast.Import | ast.ImportFrom) and not _is_docstring(part):
                start = min([part.lineno, *(decorator.lineno for decorator in getattr(part, "decorator_list", []))])
                lines |= set(range(start, (part.end_lineno or start) + 1))
        for part in ast.walk(node):
            if isinstance(part, ast.stmt) and _is_docstring(part):
                lines -= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    text = source.splitlines()
    return sum(bool(text[line - 1].strip()) and not text[line - 1].strip().startswith("#") for line in lines)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# ---------------------------------------------------------------- the scripts a stranger writes


def test_a_task_of_your_own_is_25_lines_and_an_agent_with_a_tool_is_30() -> None:
    assert lines_of_code(FOLDER / "own_task.py", ("LargestDigit", "main")) <= 25
    assert lines_of_code(FOLDER / "tools.py", ("calculator", "episode", "sample", "right_sum", "main")) <= 30


def test_counting_lines_leaves_out_imports_docstrings_comments_and_blanks(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""Doc."""\nimport os\n\n\n@property\ndef f():\n    """Doc\n    more."""\n    # why\n    return (\n        1\n    )\n\nx = 1\n'
    )
    assert lines_of_code(file) == 6
    assert lines_of_code(file, ("f",)) == 5


# The first figure is the start, the second the trained policy, both on held-out prompts. Beside the bar: what was measured when written.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start_below", "bar"),
    [
        ("own_task", 0.4, 0.8),  # .18 -> .93
        ("ppo_with_critic", 0.7, 0.9),  # .51 -> .97
        ("tools", 0.5, 0.75),  # .26 -> .92
        ("offline", 0.5, 0.65),  # .34 -> .79
    ],
)
def test_it_learns_and_prints_so(example: Any, name: str, start_below: float, bar: float, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example(name).main()
    assert before <= start_below
    assert after >= bar
    assert f"{before:.2f} -> {after:.2f}" in capsys.readouterr().out


def test_the_calculator_adds_what_it_is_given_and_never_fails(example: Any) -> None:
    calculator = example("tools").calculator
    assert [calculator(call) for call in ("34+57#", "34+#", "#", "+=?!")] == ["91!", "34!", "0!", "0!"]


def test_the_ids_of_the_tool_are_not_trained_on(example: Any) -> None:
    import asyncio

    tools = example("tools")
    tokenizer = importlib.import_module("quickstart").make_tokenizer(tools.ALPHABET)
    said = {"34+57=": "34+57#", "34+57=34+57#91!": "91"}
    engine = rlhf.FakeEngine(tokenizer, responses=lambda prompt, number, seed: said[tokenizer.decode(prompt.ids)])
    prompts = rlhf.PromptDataset([{"prompt": "34+57=", "ground_truth": "91"}], tokenizer)
    rollout = asyncio.run(tools.sample(engine, prompts[:], n=2, temperature=1.0))
    assert rollout.texts == ["34+57#91!91"] * 2
    sampled = tokenizer.decode(rollout.response_ids[0][rollout.response_mask[0]], skip_special_tokens=True)
    assert sampled == "34+57#91"
    assert rollout.group.tolist() == [0, 0]
    assert tools.right_sum(rollout).scores.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- bare JSON


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"name": "Anna", "age": 31}', 1.0),
        (' {"age": "x",\n "name": null}\n', 1.0),
        ('```json\n{"name": "Anna", "age": 31}\n```', 0.4),
        ('Sure: {"name": "Anna", "age": 31}', 0.4),
        ('{"name": "Anna", "age": 31} and {"a": 1}', 0.4),
        ('{"name": "Anna", "age": 31', 0.0),
        ('{"name": "Anna", "age": 31,}', 0.1),
        ('{"name": "Anna"}', 0.1),
        ('{"name": "Anna", "age": 31, "more": 1}', 0.1),
        ("{}", 0.1),
        ('["name", "age"]', 0.0),
        ("} {", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a":' * 100_000 + "}", 0.1),
    ],
)
def test_json_is_paid_by_degree(example: Any, answer: str, score: float) -> None:
    assert example("json_task").BareJSON().score(rlhf.Sample("", answer, ground_truth=["name", "age"])) == score


def test_requests_are_distinct_and_those_held_out_are_left_out(example: Any) -> None:
    task, tokenizer = example("json_task"), char_tokenizer()
    unseen = {row["request"] for row in task.make_rows(24, 10_000, tokenizer)}
    seen = [row["request"] for row in task.make_rows(400, 0, tokenizer, frozenset(unseen))]
    assert len(unseen) == 24
    assert len(set(seen)) == 400
    assert not unseen & set(seen)


def test_the_json_task_runs_from_a_model_folder_to_curve_and_figures(example: Any, folder: Path) -> None:
    task: ModuleType = example("json_task")
    summary = task.main(["--model", str(folder / "model"), "--steps", "2", "--held-out", "4", "--out", str(folder / "out")])
    assert json.loads((folder / "out" / "json_task.json").read_text()) == summary
    assert (folder / "out" / "json_task.png").read_bytes().startswith(b"\x89PNG")
    assert len(summary["reward"]) == len(summary["length"]) == 2
    assert summary["greedy"] == {"before": 0.0, "after": 0.0}  # random weights
    assert summary["seconds"]["all"] > summary["seconds"]["step"] > summary["seconds"]["update"] > 0
    assert summary["peak_memory_gb"] > 0.05


# ---------------------------------------------------------------- GSM8K

SMALL = (
    *("--steps", "2", "--prompts-per-step", "4", "--mini-batch-prompts", "2", "--epochs", "2"),
    *("--max-new-tokens", "8", "--eval-prompts", "2", "--lora-rank", "4"),
)


def gsm8k(module: ModuleType, folder: Path, *arguments: str) -> dict[str, Any]:
    return module.main(["--model", str(folder / "model"), "--data", str(folder / "data"), "--out", str(folder / "out"), *arguments])


@pytest.mark.parametrize(("algorithm", "responses"), [("ppo", 1), ("grpo", 8)])
def test_gsm8k_runs_from_the_files_to_a_summary(
    example: Any, folder: Path, capsys: pytest.CaptureFixture[str], algorithm: str, responses: int
) -> None:
    summary = gsm8k(example("gsm8k"), folder, "--algorithm", algorithm, "--save", str(folder / "trained"), *SMALL)
    assert json.loads((folder / "out" / f"{algorithm}.summary.json").read_text()) == summary
    assert [evaluation["step"] for evaluation in summary["evaluations"]] == [0, 2]
    assert set(summary["evaluations"][0]) == {"step", "solved", "format", "truncated", "length", "reward"}
    assert len(summary["reward"]) == len(summary["length"]) == len(summary["truncated"]) == 2
    assert summary["kl"][0] == 0.0  # the reference is the policy at the start
    assert summary["seconds"]["update"] > 0
    lines = [json.loads(line) for line in (folder / "out" / f"{algorithm}.metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["rollout/rows"] for line in steps] == [4 * responses] * 2
    assert ("critic/value_loss" in steps[0]) == (algorithm == "ppo")
    assert ("actor/kl_reference" in steps[0]) == (algorithm == "grpo")
    out = capsys.readouterr().out
    assert f"4 problems × {responses} responses = {4 * responses} responses; a mini-batch: 2 problems = {2 * responses} responses" in out
    assert (folder / "trained" / "adapter_config.json").is_file()


def test_gsm8k_evaluates_the_start_alone_in_zero_steps(example: Any, folder: Path) -> None:
    summary = gsm8k(example("gsm8k"), folder, *SMALL, "--steps", "0")
    assert [evaluation["step"] for evaluation in summary["evaluations"]] == [0]
    assert summary["reward"] == []


def test_gsm8k_grades_as_it_is_told(example: Any, folder: Path) -> None:
    module = example("gsm8k")
    for grader, score in (("strict", 0.0), ("flexible", 0.9)):
        options = module.parse(["--model", str(folder / "model"), "--data", str(folder / "data"), "--grader", grader, *SMALL])
        options.out = folder
        reward = module.make_loop(options, rlhf.make_accelerator()).reward
        rollout = rlhf.FakeEngine(responses=["so 91"]).generate("34 + 57", rlhf.SamplingParams())
        rollout.rows[0]["ground_truth"] = "91"
        assert reward(rollout).scores.tolist() == pytest.approx([score])


def test_gsm8k_reads_parquet_of_either_schema(example: Any, folder: Path) -> None:
    module, tokenizer = example("gsm8k"), char_tokenizer()
    expected = [row["reward_model"]["ground_truth"] for row in rlhf.load_gsm8k(folder / "data" / "train.jsonl")]
    from rlhf.data.sources import read_jsonl, write_parquet

    for name, rows in (
        ("raw", read_jsonl(folder / "data" / "train.jsonl")),
        ("verl", rlhf.load_gsm8k(folder / "data" / "train.jsonl", as_text=True)),
    ):
        (folder / name).mkdir()
        write_parquet(rows, folder / name / "train.parquet")
        problems = module.read_problems(folder / name, "train", tokenizer, 512)
        assert [problem.row["reward_model"]["ground_truth"] for problem in problems] == expected
    with pytest.raises(SystemExit, match=r"must hold test\.parquet or test\.jsonl"):
        module.read_problems(folder / "raw", "test", tokenizer, 512)


def test_gsm8k_takes_presets_and_flags_overrule_them(example: Any) -> None:
    parse, required = example("gsm8k").parse, ["--model", "m", "--data", "d"]
    plain = parse(required)
    assert (plain.gamma, plain.lam, plain.actor_lr, plain.critic_lr, plain.format_weight) == (1.0, 0.95, 1e-5, 1e-5, 0.1)
    assert parse([*required, "--lora-rank", "0"]).actor_lr == 1e-6
    article = parse([*required, "--preset", "article", "--lam", "0.9"])
    assert (article.gamma, article.lam, article.actor_lr, article.critic_lr, article.format_weight) == (0.99, 0.9, 1e-6, 1e-5, 0.0)
    assert (article.clip, article.epochs, article.kl, article.entropy, article.lora_rank) == (0.2, 4, 0.001, 0.01, 32)
    assert (article.prompts_per_step, article.mini_batch_prompts, article.eval_every, article.responses) == (1024, 256, 5, 1)
    for bad in (["--algorithm", "grpo", "--responses", "1"], ["--format-weight", "0.5"]):
        with pytest.raises(SystemExit):
            parse([*required, *bad])


@pytest.mark.slow
def test_gsm8k_runs_in_two_processes_and_writes_once(folder: Path) -> None:
    paths = ["--model", str(folder / "model"), "--data", str(folder / "data"), "--out", str(folder / "out")]
    done = launch(TORCHRUN, 2, FOLDER / "gsm8k.py", *paths, "--algorithm", "grpo", "--responses", "2", *SMALL)
    summary = json.loads((folder / "out" / "grpo.summary.json").read_text())
    assert summary["processes"] == len(summary["peak_memory_gb"]) == 2
    assert len(summary["reward"]) == 2
    assert done.stdout.count("wrote ") == 1
    assert len((folder / "out" / "grpo.metrics.jsonl").read_text().splitlines()) == 4


# ---------------------------------------------------------------- every script


@pytest.mark.parametrize("name", RUNNABLE)
def test_help_names_every_option(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument"]
    flags = [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]
    assert flags
    assert [flag for flag in flags if flag not in done.stdout] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_says_what_it_is_and_does_nothing_when_imported(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    main()"
    assert not [node for node in tree.body[:-1] if isinstance(node, ast.For | ast.While | ast.If | ast.With | ast.Try)]

"""The README's code runs: its blocks in their order, in one namespace, with a tiny model and tiny numbers in place of the large ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.models import char_tokenizer, tiny_model

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
SMALLER = {
    "prompts_per_step=128": "prompts_per_step=4",
    "n=8, max_new_tokens=512": "n=2, max_new_tokens=6",
    "mini_batch_size=256": "mini_batch_size=4",
    "split(200, seed=0)": "split(4, seed=0)",
    "temperature=0.0, max_new_tokens=512": "temperature=0.0, max_new_tokens=6",
    "eval_every=20": "eval_every=1",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rlhf.errors.RLHFWarning")
def test_the_blocks_run_in_their_order_and_do_what_the_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    model = tiny_model("qwen2", max_position_embeddings=512)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("gsm8k").mkdir()
    problems = [{"question": f"{i} + {i}", "answer": f"add\n#### {2 * i}"} for i in range(12)]
    Path("gsm8k/train.jsonl").write_text("\n".join(map(json.dumps, problems)), encoding="utf-8")

    code = "\n".join(BLOCKS)
    for large, small in {'"Qwen/Qwen2.5-0.5B-Instruct"': '"model"', **SMALLER}.items():
        assert large in code, f"README no longer says {large}; adapt this test"
        code = code.replace(large, small)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)

    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if re.fullmatch(r"[\d.-]+ [\d.]+", line)]) == 3  # 12 prompts, 4 a step, one epoch
    # 3 steps × 4 epochs × 8 responses in mini-batches of 4, then the ready-made loop: 2 steps of one mini-batch
    assert names["actor"].weight_version == 3 * 4 * 2 + 2
    lines = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [0, 1]
    assert [line["step"] for line in lines if "eval/held out/pass@1" in line] == [0, 1, 2]
    assert names["metrics"].keys() >= {"critic/explained_variance", "kl/reference_k3", "reward/part/GSM8K", "reward/part/Format"}


def test_every_file_that_the_readme_links_to_exists() -> None:
    root = Path(__file__).resolve().parents[1]
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert len(targets) >= 5
    assert not [target for target in targets if not (root / target).exists()]


def test_every_path_in_the_table_of_rooms_exists_and_no_room_is_left_out() -> None:
    root = Path(__file__).resolve().parents[1]
    listed = re.findall(r"^\| `(rlhf/[\w./]+)` \|", README, flags=re.MULTILINE)
    present = {
        f"rlhf/{path.name}/" if path.is_dir() else f"rlhf/{path.name}"
        for path in (root / "rlhf").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(listed) == present - {"rlhf/__init__.py", "rlhf/version.py"}

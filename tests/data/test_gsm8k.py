from __future__ import annotations

import json

import pytest

from rlhf.data import PromptDataset, gsm8k_to_parquet, load_gsm8k, read_parquet, write_parquet
from rlhf.data.gsm8k import DEFAULT_INSTRUCTION, gsm8k_ground_truth
from rlhf.errors import ConfigError, DataError
from tests.data.conftest import character_tokenizer

PROBLEMS = [
    {"question": "Tom has 3 pens and buys 4. How many?", "answer": "3+4 = <<3+4=7>>7 pens.\n#### 7"},
    {"question": " A car costs $1,200 and a van $34 more. The van? ", "answer": "1200+34 = 1234\n#### 1,234"},
    {"question": "It is 3 degrees and falls by 8. Now?", "answer": "#### 5 is wrong\n#### -5"},
]


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, PROBLEMS)))
    return path


def test_rows_have_verls_schema_and_data_source(train):
    assert load_gsm8k(train)[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"A car costs $1,200 and a van $34 more. The van?\n\n{DEFAULT_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "train", "index": 1, **PROBLEMS[1]},
    }


def test_the_ground_truth_is_the_last_number_without_commas(train):
    assert [row["reward_model"]["ground_truth"] for row in load_gsm8k(train)] == ["7", "1234", "-5"]


@pytest.mark.parametrize(
    "answer, number",
    [
        ("#### 72", "72"),
        ("####72", "72"),
        ("#### 1,234,567\n", "1234567"),
        ("#### $18", "18"),
        ("#### 0.5", "0.5"),
        ("#### 007", "007"),
        ("#### 72 apples", None),
        ("#### .", None),
        ("#### ", None),
        ("72", None),
        ("#### 7\nso 8", None),
    ],
)
def test_which_endings_are_a_final_number(answer, number):
    assert gsm8k_ground_truth(answer) == number


def test_instruction_and_system_prompt_are_parameters(train):
    row = load_gsm8k(train, instruction="Answer in words.", system_prompt="You teach.", split="dev")[0]
    assert row["prompt"] == [
        {"role": "system", "content": "You teach."},
        {"role": "user", "content": "Tom has 3 pens and buys 4. How many?\n\nAnswer in words."},
    ]
    assert row["extra_info"]["split"] == "dev"
    assert load_gsm8k(train, instruction="")[0]["prompt"] == [{"role": "user", "content": "Tom has 3 pens and buys 4. How many?"}]


def test_text_prompts_serve_models_without_a_chat_template(train):
    rows = load_gsm8k(train, as_text=True, instruction="End with #### and the number.")
    assert rows[0]["prompt"] == "Question: Tom has 3 pens and buys 4. How many?\n\nEnd with #### and the number.\nAnswer:"
    assert len(PromptDataset(rows, character_tokenizer(chat_template=None))) == 3
    with pytest.raises(ConfigError, match="put the text into instruction"):
        load_gsm8k(train, as_text=True, system_prompt="You teach.")


@pytest.mark.parametrize("as_text", [False, True])
def test_parquet_reads_back_identically(train, tmp_path, as_text):
    target = gsm8k_to_parquet(train, tmp_path / "train.parquet", as_text=as_text)
    rows = load_gsm8k(train, as_text=as_text)
    assert read_parquet(target) == rows
    tokenizer = character_tokenizer()
    assert PromptDataset.from_parquet(target, tokenizer).fingerprint == PromptDataset(rows, tokenizer).fingerprint


def test_the_dataset_knows_the_ground_truth_of_each_row(train):
    dataset = PromptDataset(load_gsm8k(train), character_tokenizer())
    assert [prompt.row["ground_truth"] for prompt in dataset] == ["7", "1234", "-5"]
    assert dataset.data_sources == {"openai/gsm8k"}


def test_the_problems_may_come_as_parquet(train, tmp_path):
    assert load_gsm8k(write_parquet(PROBLEMS, tmp_path / "train.parquet")) == load_gsm8k(train)


@pytest.mark.parametrize(
    "broken, complaint",
    [
        ({"question": "q", "answer": "seven"}, "row 1: key 'answer' must end in '#### number', got 'seven'"),
        ({"question": "q"}, "row 1: expected text under key 'answer', got None; it has question"),
        ({"question": 3, "answer": "#### 1"}, "row 1: expected text under key 'question', got 3"),
    ],
)
def test_malformed_rows_are_named(tmp_path, broken, complaint):
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(map(json.dumps, [PROBLEMS[0], broken])))
    with pytest.raises(DataError, match=complaint):
        load_gsm8k(path)


@pytest.mark.parametrize("split, count, first", [("train", 7473, "72"), ("test", 1319, "18")])
def test_the_real_files_are_read_whole(shared, tmp_path, split, count, first):
    source = shared / "data" / "gsm8k" / f"{split}.jsonl"
    rows = load_gsm8k(source)
    assert len(rows) == count
    assert rows[0]["reward_model"]["ground_truth"] == first
    assert all(float(row["reward_model"]["ground_truth"]) == int(row["reward_model"]["ground_truth"]) for row in rows)
    assert {row["extra_info"]["split"] for row in rows} == {split}
    assert read_parquet(gsm8k_to_parquet(source, tmp_path / f"{split}.parquet")) == rows


def test_the_real_test_set_goes_through_a_loader(shared):
    dataset = PromptDataset(load_gsm8k(shared / "data" / "gsm8k" / "test.jsonl"), character_tokenizer())
    assert len(set(dataset.uids)) == 1319
    seen = [prompt.row["uid"] for batch in dataset.loader(128, drop_last=False) for prompt in batch]
    assert sorted(seen) == sorted(dataset.uids)

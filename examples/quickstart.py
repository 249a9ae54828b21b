"""The main job, from nothing to a policy that has learned, on a CPU in two minutes.

A character-level model of 0.12 M parameters learns to rearrange 3–5 digits by supervised fine-tuning on a mixture (ascending, copied,
descending), so that it sorts ascending about half of the time. PPO with a critic, and GRPO from the same start, then raise that to nearly
always, by a verifiable reward alone: 1 if the answer is the digits in ascending order, else 0.

    python examples/quickstart.py --seed 0 --out .
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/quickstart.py
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import rlhf

SYMBOLS = ["<pad>", "<eos>", *"0123456789", "=", "#", "?", "!"]


def make_tokenizer(symbols: list[str] = SYMBOLS) -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?")


def make_model(seed: int, symbols: list[str] = SYMBOLS) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(symbols),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


class SortedAscending(rlhf.RewardFunction):
    """1 for exactly the digits of the prompt in ascending order, else 0."""

    def score(self, sample: rlhf.Sample) -> float:
        return float(sample.response == sample.ground_truth)


def make_rows(count: int, seed: int, leave_out: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """Distinct inputs of 3–5 digits as dataset rows, none of them in `leave_out`."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        digits = "".join(rng.choices("0123456789", k=rng.randint(3, 5)))
        if digits not in leave_out:
            rows[digits] = {"prompt": f"{digits}=", "ground_truth": "".join(sorted(digits))}
    return list(rows.values())


def fine_tune(prompts: rlhf.PromptDataset, seed: int, progress: bool, parallel: Any = None) -> rlhf.Actor:
    """The start: a policy that sorts, copies or reverses, in the proportions it was shown."""
    steps, warmup, batch_size = 300, 50, 64
    rng = random.Random(seed + 1)
    answers = []
    for prompt in prompts:
        digits = prompt.row["prompt"][:-1]
        kind = rng.choices(("ascending", "copied", "descending"), weights=(0.4, 0.3, 0.3))[0]
        answers.append({"ascending": sorted(digits), "copied": digits, "descending": sorted(digits, reverse=True)}[kind])

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup, 2 * (steps - step) / steps)

    actor = rlhf.Actor(
        make_model(seed),
        prompts.tokenizer,
        parallel=parallel,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    )
    experience = rlhf.supervised_experience(prompts, ["".join(answer) for answer in answers], actor.tokenizer)
    rlhf.train_supervised(actor, experience, steps=steps, batch_size=batch_size, seed=seed, progress=progress)
    return actor


def new_actor(start: rlhf.Actor, seed: int, parallel: Any) -> rlhf.Actor:
    """A policy that begins as `start` and leaves it alone."""
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)  # noqa: E731
    return rlhf.Actor(copy.deepcopy(start.model), start.tokenizer, optimizer=adamw, seed=seed, parallel=parallel)


def run_ppo(
    start: rlhf.Actor, prompts: rlhf.PromptDataset, seed: int, *, sign: float = 1.0, parallel: Any = None, **options: Any
) -> tuple[rlhf.Actor, rlhf.OnPolicyLoop]:
    """256 prompts a step, one answer each, a critic; 40 steps."""
    actor = new_actor(start, seed, parallel)
    critic = rlhf.Critic(copy.deepcopy(start.model), lr=1e-3, seed=seed, parallel=parallel)
    estimator = rlhf.GAE(gamma=1.0, lam=0.95)
    loop = rlhf.OnPolicyLoop(
        engine=rlhf.TransformersEngine(actor, seed=seed),
        loader=prompts.loader(prompts_per_step=256, seed=seed, epochs=None),
        reward=SortedAscending(),
        actor=actor,
        critic=critic,
        reference=start,
        estimator=estimator if sign == 1 else flipped(estimator),
        sampling=rlhf.SamplingParams(max_new_tokens=8),
        loss=rlhf.PolicyLoss(clip=0.2),
        value_loss=rlhf.ValueLoss(clip=0.2),
        mini_batch_size=128,
        critic_warmup=5,
        **options,
    )
    loop.run(40)
    return actor, loop


def run_grpo(
    start: rlhf.Actor, prompts: rlhf.PromptDataset, seed: int, *, sign: float = 1.0, parallel: Any = None, **options: Any
) -> tuple[rlhf.Actor, rlhf.OnPolicyLoop]:
    """32 prompts a step, eight answers each, no critic and no KL; 50 steps."""
    actor = new_actor(start, seed, parallel)
    estimator = rlhf.GRPO()
    loop = rlhf.OnPolicyLoop(
        engine=rlhf.TransformersEngine(actor, seed=seed),
        loader=prompts.loader(prompts_per_step=32, seed=seed, epochs=None),
        reward=SortedAscending(),
        actor=actor,
        reference=start,
        estimator=estimator if sign == 1 else flipped(estimator),
        sampling=rlhf.SamplingParams(n=8, max_new_tokens=8),
        **options,
    )
    loop.run(50)
    return actor, loop


def flipped(estimator: rlhf.GAE | rlhf.GRPO):
    """The estimator with the sign of its advantages turned: the control that must not learn."""

    def estimate(experience: rlhf.Experience) -> rlhf.Advantages:
        result = estimator(experience)
        return result._replace(advantages=-result.advantages)

    return estimate


def measure(actor: rlhf.Actor, start: rlhf.Actor, prompts: rlhf.PromptDataset) -> dict[str, float]:
    """Accuracy on held-out inputs, greedy and sampled, and KL to the start (nats per token)."""
    engine = rlhf.TransformersEngine(actor, seed=1)
    result = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rollout = engine.generate(prompts, rlhf.SamplingParams(max_new_tokens=8, temperature=temperature))
        result[name] = float(SortedAscending()(rollout).scores.mean())
    kl = rlhf.kl_estimate(actor.logprobs(rollout), start.logprobs(rollout), "k1")
    return result | {"kl": float(rlhf.masked_mean(kl, rollout.response_mask))}


def plot(loops: dict[str, rlhf.OnPolicyLoop], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), constrained_layout=True)
    panels = (
        ("reward/mean", "reward (mean of the step)"),
        ("eval/held out/mean", "greedy accuracy, held out"),
        ("kl/reference_k1", "KL to the start (nats per token)"),
    )
    for axis, (name, title) in zip(axes, panels, strict=True):
        for label, loop in loops.items():
            points = [(metrics["step"], metrics[name]) for metrics in [*loop.history, *loop.evaluations] if name in metrics]
            axis.plot(*zip(*points, strict=True), label=label, marker="o" if name.startswith("eval") else None, markersize=3)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for quickstart.png and quickstart.json")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; one is fastest for a model this small")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    tokenizer = make_tokenizer()
    unseen = make_rows(1000, seed=10_000)
    held_out = rlhf.PromptDataset(unseen, tokenizer)
    prompts = rlhf.PromptDataset(make_rows(20_000, options.seed, leave_out=frozenset(row["prompt"][:-1] for row in unseen)), tokenizer)
    parallel = rlhf.make_accelerator()
    main_process = parallel.is_main_process
    progress = main_process and not options.quiet
    start = fine_tune(prompts, options.seed, progress, parallel)
    results = {"start": measure(start, start, held_out) | {"seconds": time.perf_counter() - begin}}
    loops = {}
    evaluation = rlhf.EvalSet(held_out[:200], sampling=rlhf.SamplingParams(temperature=0.0, max_new_tokens=8))
    for name, train in (("PPO", run_ppo), ("GRPO", run_grpo)):
        if main_process:
            print(f"\n{name}")
        clock = time.perf_counter()
        actor, loops[name] = train(
            start, prompts, options.seed, parallel=parallel, progress=progress, evals={"held out": evaluation}, eval_every=5
        )
        seconds = time.perf_counter() - clock
        results[name.lower()] = measure(actor, start, held_out) | {"seconds": seconds}

    summary = {**results, "seed": options.seed, "processes": parallel.num_processes, "seconds": time.perf_counter() - begin}
    if not main_process:
        return summary
    print(f"\n{'':6} {'greedy':>8} {'sampled':>8} {'KL':>8} {'seconds':>8}   (1,000 held-out inputs)")
    for name, result in results.items():
        print(f"{name:6} {result['greedy']:8.3f} {result['sampled']:8.3f} {result['kl']:8.4f} {result['seconds']:8.1f}")
    plot(loops, options.out / "quickstart.png")
    (options.out / "quickstart.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\nwrote {options.out / 'quickstart.png'} and {options.out / 'quickstart.json'} after {summary['seconds']:.0f} seconds")
    return summary


if __name__ == "__main__":
    main()

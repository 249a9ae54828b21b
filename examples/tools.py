"""Multi-turn reinforcement learning with a tool: a tiny model learns to ask a calculator instead of guessing sums.

    34+57=            the prompt
    34+57#            the policy may write a call ...
    91!               ... whose result the environment appends; no gradient goes to these tokens
    91                the policy answers

`calculator`, `episode`, `sample` and the loop in `main` are all there is to it, 30 lines. `make_start` only teaches the tiny model the
format: a third of its examples call, the others guess. Half a minute on a CPU core.
"""

from __future__ import annotations

import asyncio
import random
import re

from quickstart import SYMBOLS, make_model, make_tokenizer

import rlhf

ALPHABET = [*SYMBOLS, "+"]


def calculator(call: str) -> str:
    sum_ = re.search(r"^(\d+)\+(\d+)#$", call)
    return f"{int(sum_[1]) + int(sum_[2])}!" if sum_ else "!"


async def episode(engine: rlhf.TransformersEngine, prompt: rlhf.Prompt, sampling: rlhf.SamplingParams) -> list[rlhf.Turn]:
    context, turns = prompt.ids.tolist(), []
    for _ in range(2):
        said = await engine.agenerate(context, sampling)
        ids = said.response_ids[0].tolist()
        turns.append(rlhf.Turn(context, ids, said.logprobs[0], int(said.weight_version[0]), finish_reason=said.finish_reasons[0]))
        if not said.texts[0].endswith("#"):
            break
        context = context + ids + engine.tokenizer.encode(calculator(said.texts[0]))
    return turns


async def sample(engine: rlhf.TransformersEngine, prompts: list[rlhf.Prompt], n: int, temperature: float = 1.0) -> rlhf.Rollout:
    call_ends = engine.tokenizer.convert_tokens_to_ids("#")
    sampling = rlhf.SamplingParams(max_new_tokens=8, temperature=temperature, stop_token_ids=(call_ends,))
    tasks = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(n)]
    episodes = await asyncio.gather(*(episode(engine, prompt, sampling) for _, prompt in tasks))
    groups, rows = [group for group, _ in tasks], [prompt.row for _, prompt in tasks]
    return rlhf.Rollout.from_turns(episodes, tokenizer=engine.tokenizer, temperature=temperature, group=groups, rows=rows)


@rlhf.verifier
def right_sum(sample: rlhf.Sample) -> float:
    sample.log("calls", sample.response.count("#"))
    return float(re.split("[#!]", sample.response)[-1] == sample.ground_truth)


def main(steps: int = 25) -> tuple[float, float]:
    actor, train, held_out = make_start()
    engine = rlhf.TransformersEngine(actor)
    before = right_sum(asyncio.run(sample(engine, held_out[:], n=1, temperature=0.0))).metrics()
    for step, batch in zip(range(steps), train.loader(prompts_per_step=16, epochs=None)):  # noqa: B905 (the loader has no end)
        rollout = asyncio.run(sample(engine, batch, n=8))
        rewards = right_sum(rollout)
        experience = rlhf.make_experience(rollout, rewards, actor=actor).with_advantages(rlhf.GRPO())
        actor.update(experience)
        if step % 5 == 4:
            print(f"step {step + 1:3}  reward {rewards.metrics()['reward/mean']:.2f}  calls {rewards.metrics()['reward/log/calls']:.2f}")
    after = right_sum(asyncio.run(sample(engine, held_out[:], n=1, temperature=0.0))).metrics()
    print(f"right sums, {len(held_out)} held-out prompts, greedy: {before['reward/mean']:.2f} -> {after['reward/mean']:.2f}")
    return before["reward/mean"], after["reward/mean"]


def make_start() -> tuple[rlhf.Actor, rlhf.PromptDataset, rlhf.PromptDataset]:
    """A policy that knows the format, prompts to train on and prompts to test on."""
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 4000)
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a, b in pairs]
    tokenizer = make_tokenizer(ALPHABET)
    train, held_out = rlhf.PromptDataset(rows, tokenizer).split(200)
    texts, answers = [], []
    for prompt in train:
        problem, gold = prompt.row["prompt"], prompt.row["ground_truth"]
        call = problem[:-1] + "#"
        texts += [problem, f"{problem}{call}{gold}!"]
        answers += [call if rng.random() < 0.33 else str(rng.randint(20, 198)), gold]
    model, schedule = make_model(seed=0, symbols=ALPHABET), rlhf.linear_decay(400, warmup=50)
    actor = rlhf.Actor(model, tokenizer, optimizer=rlhf.adamw(3e-3, betas=(0.9, 0.98)), scheduler=schedule)
    rlhf.train_supervised(actor, rlhf.supervised_experience(texts, answers, tokenizer), steps=400, batch_size=64, progress=False)
    return rlhf.Actor(actor.model, tokenizer, lr=5e-4), train, held_out


if __name__ == "__main__":
    main()

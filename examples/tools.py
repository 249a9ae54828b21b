"""Multi-turn reinforcement learning with a tool: a tiny model learns to ask a calculator instead of guessing sums.

    34+57=            the prompt
    34+57#            the policy may write a call ...
    91!               ... whose result the environment appends; no gradient goes to these tokens
    91                the policy answers

The tool, the episode, the sampling, the reward and the loop are 30 lines. `make_start` teaches the tiny model the format, from examples of
which a third call and the others guess. A minute on a CPU core.
"""

from __future__ import annotations

import asyncio
import random
import re

from quickstart import SYMBOLS, make_model, make_tokenizer

import rlhf

ALPHABET = [*SYMBOLS, "+"]


def calculator(call: str) -> str:
    return f"{sum(int(number) for number in re.findall('[0-9]+', call))}!"


async def episode(engine: rlhf.RolloutEngine, prompt: rlhf.Prompt, sampling: rlhf.SamplingParams) -> list[rlhf.Turn]:
    context, turns = prompt.ids.tolist(), []
    for _ in range(2):
        said = await engine.agenerate(context, sampling)
        ids = said.response_ids[0].tolist()
        turns.append(rlhf.Turn(context, ids, said.logprobs[0], int(said.weight_version[0]), finish_reason=said.finish_reasons[0]))
        if not said.texts[0].endswith("#"):
            break
        context = context + ids + engine.tokenizer.encode(calculator(said.texts[0]))
    return turns


async def sample(engine: rlhf.RolloutEngine, prompts: list[rlhf.Prompt], n: int = 1, temperature: float = 0.0) -> rlhf.Rollout:
    sampling = rlhf.SamplingParams(max_new_tokens=8, temperature=temperature, stop_token_ids=(ALPHABET.index("#"),))
    tasks = [prompt for prompt in prompts for _ in range(n)]
    episodes = await asyncio.gather(*(episode(engine, prompt, sampling) for prompt in tasks))
    groups, rows = [number // n for number in range(len(tasks))], [prompt.row for prompt in tasks]
    return rlhf.Rollout.from_turns(episodes, tokenizer=engine.tokenizer, temperature=temperature, group=groups, rows=rows)


@rlhf.verifier
def right_sum(sample: rlhf.Sample) -> float:
    return float(re.split("[#!]", sample.response)[-1] == sample.ground_truth)


def main(steps: int = 25) -> tuple[float, float]:
    actor, engine, train, held_out = make_start()
    before = right_sum(asyncio.run(sample(engine, held_out[:]))).scores.mean()
    for _, batch in zip(range(steps), train.loader(prompts_per_step=16, epochs=None)):  # noqa: B905 (the loader has no end)
        rollout = asyncio.run(sample(engine, batch, n=8, temperature=1.0))
        actor.update(rlhf.make_experience(rollout, right_sum(rollout), actor=actor).with_advantages(rlhf.GRPO()))
    after = right_sum(asyncio.run(sample(engine, held_out[:]))).scores.mean()
    print(f"right sums, {len(held_out)} held-out prompts, greedy: {before:.2f} -> {after:.2f}")
    return float(before), float(after)


def make_start() -> tuple[rlhf.Actor, rlhf.RolloutEngine, rlhf.PromptDataset, rlhf.PromptDataset]:
    """A policy that knows the format, its engine, prompts to train on and prompts to test on."""
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
    actor = rlhf.Actor(actor.model, tokenizer, lr=5e-4)
    return actor, rlhf.TransformersEngine(actor), train, held_out


if __name__ == "__main__":
    main()

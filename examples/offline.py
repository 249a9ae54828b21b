"""Offline reinforcement learning: sample once, save, and train from the files, with importance correction for what has changed since.

Rollouts of the start are sampled and saved. Training never samples again: each pass reads them back and weighs every token by how much
likelier the policy of now finds it than the one that sampled it. A minute on a CPU core.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

from quickstart import SortedAscending, fine_tune, make_rows, make_tokenizer

import rlhf


def main(passes: int = 6) -> tuple[float, float]:
    tokenizer = make_tokenizer()
    train, held_out = rlhf.PromptDataset(make_rows(6000, seed=0), tokenizer).split(500)
    start = fine_tune(train, seed=0, progress=False)
    sampler = rlhf.TransformersEngine(start)
    reward = SortedAscending()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts"
        sampler.generate(train[:256], rlhf.SamplingParams(n=8, max_new_tokens=8)).save(path)  # ids and log-probabilities, bit for bit
        stored = rlhf.Rollout.load(path)

    actor = rlhf.Actor(copy.deepcopy(start.model), tokenizer, lr=5e-4)
    correction = rlhf.ImportanceCorrection("token", cap=2.0)
    loss = rlhf.PolicyLoss(clip=0.2)
    for number in range(passes):
        for first in range(0, len(stored), 256):  # 32 whole groups at a time
            rollout = stored.select(slice(first, first + 256))
            experience = rlhf.make_experience(rollout, reward(rollout), actor=actor, max_staleness=None, correction=correction)
            metrics = actor.update(experience.with_advantages(rlhf.GRPO()), loss)
        weights = experience.importance_weights[rollout.response_mask]
        share = float(weights.sum() ** 2 / (weights**2).sum() / len(weights))
        print(
            f"pass {number + 1}: mean weight {weights.mean():.3f}, effective share of tokens {share:.2f}, loss {metrics['actor/loss']:+.3f}"
        )
    before, after = (accuracy(policy, held_out, reward) for policy in (start, actor))
    print(f"sorted, {len(held_out)} held-out prompts, sampled: {before:.2f} -> {after:.2f}, from {len(stored)} stored responses")
    return before, after


def accuracy(actor: rlhf.Actor, prompts: rlhf.PromptDataset, reward: rlhf.RewardFunction) -> float:
    rollout = rlhf.TransformersEngine(actor, seed=1).generate(prompts, rlhf.SamplingParams(max_new_tokens=8))
    return float(reward(rollout).scores.mean())


if __name__ == "__main__":
    main()

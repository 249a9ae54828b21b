"""What the tests of several processes run in each of them: `torchrun --nproc_per_node P tests/processes_worker.py FOLDER`.

Every case is a function of the rows that this process holds, so that one process with all rows is the definition for two or three with
shares of them. Results go to FOLDER/<case>-<process>.pt.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.parallel import num_processes, process_index
from tests.batches import ragged_rollout, with_exact_norms
from tests.models import char_tokenizer, tiny_model

# rows of each process: unequal shares, and groups of three that straddle the border (rows 6–8 of 12)
SHARES = {1: [list(range(12))], 2: [list(range(7)), list(range(7, 12))], 3: [list(range(5)), list(range(5, 11)), [11]]}
BUDGETS = (4096, 16, 40)  # different numbers of micro-batches in different processes


def own_rows() -> list[int]:
    return SHARES[num_processes()][process_index()]


def accelerator() -> Any:
    return rlhf.make_accelerator() if num_processes() > 1 else None


def models(dtype: torch.dtype, **options: Any) -> tuple[rlhf.Actor, rlhf.Critic]:
    # other weights in every process until DDP makes them those of the first
    model = with_exact_norms(tiny_model("qwen2", seed=process_index()).to(dtype))
    sgd: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
    options = {"optimizer": sgd, "micro_batch_tokens": BUDGETS[process_index()], "parallel": accelerator()} | options
    critic = rlhf.Critic(copy.deepcopy(model), **options)
    return rlhf.Actor(model, char_tokenizer(), **options), critic


def rollout_and_rewards(**extras: Any) -> tuple[rlhf.Rollout, rlhf.Rewards]:
    rollout = ragged_rollout(prompts=4, n=3)
    rollout.extras["global_group"] = rollout.group.clone()
    rollout = rollout.select(own_rows())
    scores = torch.tensor([0.0, 1, 0.5, 1, 1, 1, 0, 0.25, 1, 2, float("nan"), 0])[own_rows()]
    status = ["error" if score.isnan() else "ok" for score in scores]
    return rollout, rlhf.Rewards(scores, status)  # type: ignore[arg-type]


def weights(*learners: rlhf.Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for learner in learners for parameter in learner.module.parameters()]


def ppo(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    actor, critic = models(dtype)
    reference = actor.reference()
    kl = rlhf.KLPenalty(rlhf.AdaptiveKL(0.5, target=0.01, horizon=50))
    rollout, rewards = rollout_and_rewards()
    metrics: dict[str, float] = {}
    for _ in range(2):
        experience = rlhf.make_experience(rollout, rewards, actor=actor, critic=critic, reference=reference, max_staleness=None)
        experience = experience.with_advantages(rlhf.GAE(lam=0.9), kl=kl)
        metrics = actor.update(experience, rlhf.PolicyLoss(entropy_coef=0.01), epochs=2, mini_batch_size=5)
        metrics |= critic.update(experience, epochs=2, mini_batch_size=5)
    return {"weights": weights(actor, critic), "metrics": metrics, "kl_coef": kl.coef}


def grpo(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    actor, _ = models(dtype)
    rollout, rewards = rollout_and_rewards()
    experience = rlhf.make_experience(rollout, rewards, actor=actor).with_advantages(rlhf.GRPO())
    metrics = actor.update(experience, rlhf.PolicyLoss(aggregate="sequence-mean"), epochs=2)
    assert experience.advantages is not None
    return {"weights": weights(actor), "metrics": metrics, "advantages": experience.advantages, "rows": own_rows()}


def not_finite_in_the_last_process() -> dict[str, Any]:
    actor, _ = models(torch.float32)
    before = weights(actor)

    def loss(policy: rlhf.PolicyOutput, batch: rlhf.Experience, weights: torch.Tensor) -> rlhf.LossOutput:
        spoiled = float("nan") if process_index() == num_processes() - 1 else 1.0
        return rlhf.LossOutput((policy.logprobs * weights).sum() * spoiled, {})

    rollout, _ = rollout_and_rewards()
    metrics = actor.update(rlhf.Experience(rollout), loss)
    same = all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))
    return {"weights": weights(actor), "metrics": metrics, "unchanged": same, "version": actor.weight_version}


def one_process_has_nothing_to_train() -> dict[str, Any]:
    actor, _ = models(torch.float64)
    rollout, _ = rollout_and_rewards()
    loss_weights = rollout.response_mask.float()
    loss_weights[torch.tensor(own_rows()) >= 7] = 0.0  # all rows of the second process of two
    experience = rlhf.Experience(rollout, loss_weights=loss_weights)
    metrics = actor.update(experience, lambda policy, batch, weights: rlhf.LossOutput(-(policy.logprobs * weights).sum(), {}))
    return {"weights": weights(actor), "metrics": metrics}


def bfloat16_with_master_weights() -> dict[str, Any]:
    actor, _ = models(torch.bfloat16, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    rollout, _ = rollout_and_rewards()
    for _ in range(3):
        actor.update(rlhf.Experience(rollout), lambda policy, batch, weights: rlhf.LossOutput(-(policy.logprobs * weights).sum(), {}))
    return {
        "weights": [parameter.float() for parameter in weights(actor)],
        "masters": [p.detach() for p in actor.optimizer.param_groups[0]["params"]],
    }


def sampling_and_the_loop() -> dict[str, Any]:
    """Prompts are shared out, every process samples responses of its own, and the metrics are those of all."""
    actor, _ = models(torch.float32)
    seen: list[str] = []

    class Counted(rlhf.RewardFunction):
        def score(self, sample: rlhf.Sample) -> float:
            seen.append(sample.prompt)
            return float(len(sample.response))

    dataset = rlhf.PromptDataset([{"prompt": character} for character in "abcdef"], actor.tokenizer)
    engine = rlhf.TransformersEngine(actor, seed=0)
    sampling = rlhf.SamplingParams(n=2, max_new_tokens=6)
    same_prompt = engine.generate("a", sampling.replace(n=4, seed=5)).texts
    loop = rlhf.OnPolicyLoop(
        engine=engine,
        loader=dataset.loader(prompts_per_step=6, seed=0, epochs=2),
        reward=Counted(),
        actor=actor,
        estimator=rlhf.GRPO(),
        sampling=sampling,
        evals={"all": rlhf.EvalSet(list(dataset), sampling=rlhf.SamplingParams(max_new_tokens=3, temperature=0.0))},
        eval_every=2,
        metrics_file=Path(sys.argv[1]) / "metrics.jsonl",
        progress=False,
    )
    history = loop.run()
    trained = seen[12 // num_processes() // 2 :]
    return {"history": history, "evaluations": loop.evaluations, "texts": same_prompt, "judged": len(trained), "weights": weights(actor)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ppo": ppo,
    "ppo32": lambda: ppo(torch.float32),
    "grpo": grpo,
    "not_finite": not_finite_in_the_last_process,
    "nothing": one_process_has_nothing_to_train,
    "bfloat16": bfloat16_with_master_weights,
    "loop": sampling_and_the_loop,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    rlhf.make_accelerator()
    for name, case in CASES.items():
        torch.save(case() | {"processes": num_processes()}, Path(sys.argv[1]) / f"{name}-{process_index()}.pt")
    torch.distributed.destroy_process_group()

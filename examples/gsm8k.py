"""PPO or GRPO on GSM8K, grade-school word problems with a number as answer: data, start, training, validation and summary in one file.

The reward is a rule: 1 if the number behind the last "####" is the gold answer, else 0; a share of it (--format-weight) goes to ending the
response that way. Before the first step the start is evaluated on the test problems under the same prompt and the same grader, so that
what is learned is not mistaken for what the model could do, and a change of format not for one of arithmetic.

  PPO    a critic and generalised advantages; KL to the start is taken off the reward, token by token
  GRPO   several responses to each problem are compared with one another; KL to the start is a term of the loss
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.parallel import gather_objects

PRESETS: dict[str, dict[str, Any]] = {
    # γ below 1 prefers short answers: over 300 tokens, .99 leaves a twentieth of the reward at the first
    "default": {"gamma": 1.0, "lam": 0.95, "actor_lr": None, "critic_lr": 1e-5, "format_weight": 0.1},
    "article": {"gamma": 0.99, "lam": 0.95, "actor_lr": 1e-6, "critic_lr": 1e-5, "format_weight": 0.0},
}
LORA_LR, FULL_LR = 1e-5, 1e-6
EPILOG = """
presets (a flag of its own overrules them):
  default    gamma 1, lambda .95, actor lr 1e-5 with LoRA and 1e-6 without, critic lr 1e-5, format weight .1
  article    gamma .99, lambda .95, actor lr 1e-6, critic lr 1e-5, format weight 0
Both: clip .2, 4 epochs, KL .001, entropy .01, LoRA of rank 32, 1024 problems a step in mini-batches of 256 problems' responses.

units: --prompts-per-step and --mini-batch-prompts count problems, over all processes. rlhf itself counts mini-batches in responses; both
figures are printed.

what it writes to --out: <algorithm>.metrics.jsonl, one line a step and one an evaluation (docs/metrics.md says what each name means), and
<algorithm>.summary.json: the options, the start and every later evaluation, reward and length by step, seconds by phase, peak memory.

at the size of the article, on a GPU:
  python examples/gsm8k.py --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k --algorithm ppo --preset article --out runs/ppo
on eight of them:
  accelerate launch --multi_gpu --num_processes 8 examples/gsm8k.py --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k --algorithm grpo
a look at the start alone:
  python examples/gsm8k.py --model MODEL --data gsm8k --steps 0 --eval-prompts 32 --max-new-tokens 256
scaled down to minutes on one CPU core:
  python examples/gsm8k.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k --algorithm grpo --steps 3 --prompts-per-step 4 \\
      --mini-batch-prompts 4 --responses 4 --epochs 1 --max-new-tokens 96 --eval-prompts 8
on a CPU, two processes:
  ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/gsm8k.py ...
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what")
    what.add_argument("--model", required=True, help="folder, hub name or .gguf file of a causal language model")
    data_help = (
        "folder with train and test, each as .parquet or .jsonl: columns question and answer, or the schema of rlhf.gsm8k_to_parquet"
    )
    what.add_argument("--data", type=Path, required=True, help=data_help)
    what.add_argument("--algorithm", choices=("ppo", "grpo"), default="ppo")
    what.add_argument("--preset", choices=tuple(PRESETS), default="default", help="see below (default: %(default)s)")
    what.add_argument("--out", type=Path, default=Path("."), help="folder for metrics and summary (default: here)")
    what.add_argument("--save", type=Path, help="folder for the trained policy; nothing is saved without it")
    what.add_argument("--seed", type=int, default=0)

    model = parser.add_argument_group("model")
    model.add_argument("--lora-rank", type=int, default=32, help="of the policy's adapter; 0 trains all weights (default: %(default)s)")
    model.add_argument("--critic-lora-rank", type=int, default=0, help="the same for the critic (default: %(default)s)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on a GPU, else float32")
    model.add_argument("--gradient-checkpointing", action="store_true", help="less memory, about a third more time")
    model.add_argument("--micro-batch-tokens", type=int, help="most tokens of one forward pass of the update")

    objective = parser.add_argument_group("objective")
    objective.add_argument("--gamma", type=float, help="discount per token, PPO (preset)")
    objective.add_argument("--lam", type=float, help="lambda of the generalised advantages, PPO (preset)")
    objective.add_argument("--actor-lr", type=float, help="(preset)")
    objective.add_argument("--critic-lr", type=float, help="(preset)")
    objective.add_argument("--format-weight", type=float, help="share of the reward paid for ending in '#### number' (preset)")
    grader_help = "strict: what is behind the last '####' only; flexible: else the last number (default: %(default)s)"
    objective.add_argument("--grader", choices=("strict", "flexible"), default="strict", help=grader_help)
    objective.add_argument("--clip", type=float, default=0.2, help="(default: %(default)s)")
    objective.add_argument("--kl", type=float, default=0.001, help="coefficient of the KL to the start; 0 for none (default: %(default)s)")
    objective.add_argument("--entropy", type=float, default=0.01, help="coefficient of the entropy bonus (default: %(default)s)")
    objective.add_argument("--critic-warmup", type=int, default=0, help="first steps that train the critic alone (default: %(default)s)")

    size = parser.add_argument_group("size")
    size.add_argument("--steps", type=int, help="default: one pass over the training problems; 0 evaluates the start")
    size.add_argument("--prompts-per-step", type=int, default=1024, help="problems a step (default: %(default)s)")
    size.add_argument(
        "--mini-batch-prompts", type=int, default=256, help="problems whose responses make an optimiser step (default: %(default)s)"
    )
    size.add_argument("--epochs", type=int, default=4, help="passes over the responses of a step (default: %(default)s)")
    size.add_argument("--responses", type=int, help="to each problem (default: 1 for ppo, 8 for grpo)")
    size.add_argument("--max-prompt-tokens", type=int, default=512, help="longer problems are left out (default: %(default)s)")
    size.add_argument("--max-new-tokens", type=int, default=512, help="in training and in validation (default: %(default)s)")
    size.add_argument(
        "--temperature", type=float, default=1.0, help="of the training rollouts; validation is greedy (default: %(default)s)"
    )
    size.add_argument("--eval-every", type=int, default=5, help="steps between validations (default: %(default)s)")
    size.add_argument("--eval-prompts", type=int, help="the first so many test problems (default: all)")
    options = parser.parse_args(arguments)

    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.actor_lr is None:
        options.actor_lr = LORA_LR if options.lora_rank else FULL_LR
    if options.responses is None:
        options.responses = 1 if options.algorithm == "ppo" else 8
    if options.dtype == "auto":
        options.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if options.algorithm == "grpo" and options.responses < 2:
        parser.error("grpo compares responses to one problem: --responses must be at least 2")
    if not 0 <= options.format_weight < 0.5:
        parser.error(f"--format-weight must be at least 0 and below 0.5, so that a right answer pays most; got {options.format_weight}")
    return options


def read_problems(folder: Path, split: str, tokenizer: Any, max_prompt_tokens: int) -> rlhf.PromptDataset:
    """The problems of one split, as chat where the model has a template and as plain text where it has none."""
    found = [path for ending in ("parquet", "jsonl") if (path := folder / f"{split}.{ending}").is_file()]
    if not found:
        raise SystemExit(f"{folder} must hold {split}.parquet or {split}.jsonl")
    limit: dict[str, Any] = {"max_prompt_tokens": max_prompt_tokens, "overlong": "drop"}
    if found[0].suffix == ".parquet":
        import pyarrow.parquet

        if "prompt" in pyarrow.parquet.read_schema(found[0]).names:
            return rlhf.PromptDataset.from_parquet(found[0], tokenizer, **limit)
    rows = rlhf.load_gsm8k(found[0], as_text=tokenizer.chat_template is None, split=split)
    return rlhf.PromptDataset(rows, tokenizer, **limit)


def make_loop(options: argparse.Namespace, parallel: Any) -> rlhf.OnPolicyLoop:
    """Everything that the options describe, joined."""
    common = {
        "dtype": options.dtype,
        "gradient_checkpointing": options.gradient_checkpointing,
        "micro_batch_tokens": options.micro_batch_tokens,
        "seed": options.seed,
        "parallel": parallel,
    }
    ppo = options.algorithm == "ppo"
    actor = rlhf.Actor.from_pretrained(options.model, lora=_lora(options.lora_rank), lr=options.actor_lr, **common)
    critic = (
        rlhf.Critic.from_pretrained(options.model, lora=_lora(options.critic_lora_rank), lr=options.critic_lr, **common) if ppo else None
    )
    train, test = (read_problems(options.data, split, actor.tokenizer, options.max_prompt_tokens) for split in ("train", "test"))
    prompts = min(options.prompts_per_step, len(train))
    mini_batch = min(options.mini_batch_prompts, prompts)
    if parallel.is_main_process:
        print(
            f"{len(train)} training and {len(test)} test problems; a step: {prompts} problems × {options.responses} responses = "
            f"{prompts * options.responses} responses; a mini-batch: {mini_batch} problems = {mini_batch * options.responses} responses"
        )
    # a weight of 0 pays nothing and still reports how many end in the format
    ending = rlhf.Format(r"####\s*\$?-?\d[\d,]*(\.\d+)?\s*$", match="search")
    kl_in_loss = 0.0 if ppo else options.kl
    return rlhf.OnPolicyLoop(
        engine=rlhf.TransformersEngine(actor, seed=options.seed, progress=parallel.is_main_process),
        loader=train.loader(prompts_per_step=prompts, seed=options.seed, epochs=None if options.steps is not None else 1),
        reward=(1 - options.format_weight) * rlhf.GSM8K(options.grader) + options.format_weight * ending,
        actor=actor,
        critic=critic,
        reference=actor.reference() if options.kl else None,
        estimator=rlhf.GAE(gamma=options.gamma, lam=options.lam) if ppo else rlhf.GRPO(),
        kl=rlhf.KLPenalty(options.kl) if ppo and options.kl else None,
        loss=rlhf.PolicyLoss(clip=options.clip, entropy_coef=options.entropy, kl_coef=kl_in_loss),
        value_loss=rlhf.ValueLoss(clip=options.clip),
        sampling=rlhf.SamplingParams(n=options.responses, max_new_tokens=options.max_new_tokens, temperature=options.temperature),
        epochs=options.epochs,
        mini_batch_size=mini_batch * options.responses,
        critic_warmup=options.critic_warmup,
        evals={
            "test": rlhf.EvalSet(
                test[: options.eval_prompts or len(test)],
                sampling=rlhf.SamplingParams(temperature=0.0, max_new_tokens=options.max_new_tokens),
            )
        },
        eval_every=options.eval_every,
        metrics_file=options.out / f"{options.algorithm}.metrics.jsonl",
    )


def _lora(rank: int) -> rlhf.LoRA | None:
    return rlhf.LoRA(rank=rank) if rank else None


def validation(metrics: dict[str, float]) -> dict[str, float]:
    """What an evaluation says, under short names; "solved" is the share of problems with the right answer, format apart."""
    names = {
        "solved": "part/GSM8K",
        "format": "part/Format",
        "truncated": "truncation_rate",
        "length": "response_length",
        "reward": "mean",
    }
    return {"step": metrics["step"]} | {short: metrics[f"eval/test/{name}"] for short, name in names.items()}


def peak_memory_gb() -> float:
    """Most memory that this process has held, in 10⁹ bytes: of the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    parallel = rlhf.make_accelerator()
    if parallel.is_main_process:
        options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    loop = make_loop(options, parallel)
    loaded = time.perf_counter() - begin
    loop.run(options.steps)

    seconds = {
        name: sum(step.get(f"time/{name}", 0.0) for step in loop.history) for name in ("rollout", "reward", "logprobs", "update", "step")
    }
    summary = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "processes": parallel.num_processes,
        "evaluations": [validation(metrics) for metrics in loop.evaluations],
        "reward": [step["reward/mean"] for step in loop.history],
        "solved": [step["reward/part/GSM8K"] for step in loop.history],
        "length": [step["rollout/response_length"] for step in loop.history],
        "truncated": [step["rollout/truncation_rate"] for step in loop.history],
        "kl": [step.get("kl/reference_k1") for step in loop.history],
        "seconds": {
            "load": loaded,
            **seconds,
            "eval": sum(metrics["time/eval"] for metrics in loop.evaluations),
            "all": time.perf_counter() - begin,
        },
        "peak_memory_gb": gather_objects(peak_memory_gb()),
    }
    if options.save is not None and parallel.is_main_process:
        loop.actor.save_pretrained(options.save)
    if parallel.is_main_process:
        path = options.out / f"{options.algorithm}.summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        report(summary, path)
    return summary


def report(summary: dict[str, Any], path: Path) -> None:
    print(f"\n{'step':>5} {'solved':>7} {'format':>7} {'cut off':>8} {'length':>7}   (test problems, greedy)")
    for line in summary["evaluations"]:
        print(f"{line['step']:5.0f} {line['solved']:7.3f} {line['format']:7.3f} {line['truncated']:8.3f} {line['length']:7.1f}")
    print(f"reward by step: {' '.join(f'{reward:.3f}' for reward in summary['reward'])}")
    print(f"length by step: {' '.join(f'{length:.0f}' for length in summary['length'])}")
    print("seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in summary["seconds"].items()))
    print(f"peak memory of each process: {', '.join(f'{memory:.1f}' for memory in summary['peak_memory_gb'])} GB; wrote {path}")


if __name__ == "__main__":
    main()

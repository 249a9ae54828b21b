"""GRPO here and in TRL, on the same work, in one go: response tokens per CPU-second, and peak memory.

Random Qwen2 checkpoints (no download); 4 prompts of 32 words × 8 responses a step, one optimiser step each. Response lengths are drawn
once (10 to 128, geometric with mean 50) and forced on both sides, so that both do the same work; that they did is checked. The two take
turns, each time in a fresh process with one thread, and medians are compared. CPU time is of the whole step: sampling, reward and update.

    python benchmarks/vs_trl.py                       # small model, float32: 10 to 20 minutes
    python benchmarks/vs_trl.py --size tiny           # a minute or two
    python benchmarks/vs_trl.py --bf16                # bfloat16: ours with float32 masters, TRL's autocast
    python benchmarks/vs_trl.py --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
}
KV_HEADS = {"tiny": 2, "small": 4}
TRL_MICRO_BATCH = {"tiny": 32, "small": 8}
PROMPTS, N, PROMPT_WORDS, SHORTEST, LONGEST, MEAN = 4, 8, 32, 10, 128, 50
PAD, EOS, UNKNOWN = 0, 1, 2
MARK = "RESULT "


def forced_lengths(step: int) -> list[int]:
    """Response lengths of a step, the same on both sides."""
    rng = random.Random(step)
    return [min(LONGEST, SHORTEST + int(rng.expovariate(1 / (MEAN - SHORTEST)))) for _ in range(PROMPTS * N)]


def prompts(size: str) -> list[str]:
    rng = random.Random(1)
    vocabulary = SIZES[size]["vocab_size"]
    return [" ".join(f"w{rng.randrange(3, vocabulary)}" for _ in range(PROMPT_WORDS)) for _ in range(64)]


def score(ids: list[int], size: str) -> float:
    """Share of the tokens from the lower half of the vocabulary: cheap, and something to learn."""
    return sum(2 < token < SIZES[size]["vocab_size"] // 2 for token in ids) / max(1, len(ids))


def make_checkpoint(size: str, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES[size],
        num_key_value_heads=KV_HEADS[size],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN, **{f"w{i}": i for i in range(3, config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ------------------------------------------------------------------------------------------------ the two sides


def ours(size: str, folder: Path, steps: int, bf16: bool) -> dict[str, Any]:
    import torch

    import rlhf
    from rlhf.rollout import decoding

    torch.set_num_threads(1)

    class ForcedRow(decoding._Row):
        """A row that ends after its forced length and not before."""

        def __init__(self, group: Any, index: int) -> None:
            super().__init__(group, index)
            self.limit = lengths[index]

        @property
        def forbidden_steps(self) -> int:
            return self.limit - len(self.ids)

    decoding._Row = ForcedRow  # type: ignore[misc]

    class LowerHalf(rlhf.RewardFunction):
        def score(self, sample: rlhf.Sample) -> float:
            return score(sample.response_ids.tolist(), size)

    actor = rlhf.Actor.from_pretrained(folder, lr=1e-6, dtype="bfloat16" if bf16 else "float32", device="cpu")
    engine = rlhf.TransformersEngine(actor, progress=False)
    reward, estimator = LowerHalf(), rlhf.GRPO()
    batches = rlhf.PromptDataset([{"prompt": text} for text in prompts(size)], actor.tokenizer).loader(PROMPTS, seed=0)
    record = []
    for step, batch in zip(range(steps), batches, strict=False):
        lengths = forced_lengths(step)
        start = time.process_time()
        rollout = engine.generate(batch, rlhf.SamplingParams(n=N, max_new_tokens=LONGEST), weights=actor)
        sampled = time.process_time()
        experience = rlhf.make_experience(rollout, reward(rollout), actor=actor, old_logprobs="rollout").with_advantages(estimator)
        actor.update(experience)
        end = time.process_time()
        record.append({"lengths": sorted(rollout.lengths.tolist()), "generate": sampled - start, "cpu": end - start})
    return {"record": record, "optimizer_steps": actor.weight_version, "peak_gib": peak_gib()}


def trl(size: str, folder: Path, steps: int, bf16: bool) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import LogitsProcessor, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    record: list[dict[str, Any]] = []

    class ForceEnd(LogitsProcessor):
        """The end token exactly at each row's forced length."""

        def __init__(self, lengths: list[int]) -> None:
            self.last = torch.tensor(lengths) - 1
            self.step = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ends = self.last == self.step
            scores[~ends, EOS] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, EOS] = 0.0
            self.step += 1
            return scores

    def lower_half(completion_ids: list[list[int]], **_: Any) -> list[float]:
        record[-1]["lengths"] = sorted(map(len, completion_ids))
        return [score(ids, size) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            record.append({"start": time.process_time()})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            record[-1]["cpu"] = time.process_time() - record[-1].pop("start")

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            scratch,
            use_cpu=True,
            per_device_train_batch_size=TRL_MICRO_BATCH[size],
            gradient_accumulation_steps=PROMPTS * N // TRL_MICRO_BATCH[size],
            num_generations=N,
            max_completion_length=LONGEST,
            max_steps=steps,
            beta=0.0,
            num_iterations=1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=bf16,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=lower_half,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts(size)}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            callbacks=[Clock()],
        )
        generate = type(trainer.model).generate

        def forced(model: Any, *arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            result = generate(model, *arguments, **options, logits_processor=[ForceEnd(forced_lengths(len(record) - 1))])
            record[-1]["generate"] = time.process_time() - start
            return result

        type(trainer.model).generate = forced
        trainer.train()
        done = trainer.state.global_step
    return {"record": record, "optimizer_steps": done, "peak_gib": peak_gib()}


# ------------------------------------------------------------------------------------------------ the race


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, "--size", options.size, "--steps", str(options.steps), "--checkpoint", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command + ["--bf16"] * options.bf16, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed with exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1][len(MARK) :])


def check_same_work(results: dict[str, dict[str, Any]], steps: int) -> None:
    for side, result in results.items():
        if result["optimizer_steps"] != steps or len(result["record"]) != steps:
            raise SystemExit(f"{side} made {result['optimizer_steps']} optimiser steps in {len(result['record'])}; expected {steps}")
        for step, made in enumerate(result["record"]):
            if made["lengths"] != sorted(forced_lengths(step)):
                raise SystemExit(f"{side} did not do the work asked for in step {step}: lengths {made['lengths']}")


def summarise(result: dict[str, Any]) -> dict[str, float]:
    measured = result["record"][1:]  # the first step pays for warming up
    cpu = sum(made["cpu"] for made in measured)
    generate = sum(made["generate"] for made in measured)
    tokens = sum(sum(made["lengths"]) for made in measured)
    return {
        "tokens_per_cpu_second": tokens / cpu,
        "cpu_seconds_per_step": cpu / len(measured),
        "generate_cpu_seconds": generate / len(measured),
        "rest_cpu_seconds": (cpu - generate) / len(measured),
        "tokens_per_step": tokens / len(measured),
        "peak_gib": result["peak_gib"],
    }


def race(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("trl")
    except PackageNotFoundError:
        raise SystemExit("the race needs TRL: pip install -c constraints.txt -e '.[bench]', or make bench") from None
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        make_checkpoint(options.size, folder)
        for turn in range(options.turns):
            results = {side: run_side(side, options, folder) for side in (("ours", "trl") if turn % 2 == 0 else ("trl", "ours"))}
            check_same_work(results, options.steps)
            for side, result in results.items():
                runs[side].append(summarise(result))
                print(f"turn {turn + 1} {side:5} " + "  ".join(f"{name} {value:.2f}" for name, value in runs[side][-1].items()), flush=True)
    median = {side: {name: statistics.median(run[name] for run in sides) for name in sides[0]} for side, sides in runs.items()}
    ratios = {
        "tokens_per_cpu_second": median["ours"]["tokens_per_cpu_second"] / median["trl"]["tokens_per_cpu_second"],
        "peak_memory": median["ours"]["peak_gib"] / median["trl"]["peak_gib"],
        "generate_cpu_seconds": median["trl"]["generate_cpu_seconds"] / median["ours"]["generate_cpu_seconds"],
        "rest_cpu_seconds": median["trl"]["rest_cpu_seconds"] / median["ours"]["rest_cpu_seconds"],
    }
    return {
        "size": options.size,
        "dtype": "bfloat16" if options.bf16 else "float32",
        "turns": options.turns,
        "steps_measured": options.steps - 1,
        "versions": {name: version(name) for name in ("rlhf", "trl", "torch", "transformers")},
        **median,
        "ratios": ratios,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--turns", type=int, default=3, help="how often each side runs")
    parser.add_argument("--steps", type=int, default=2, help="steps of a run; the first is not measured")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is not measured")
    if options.side:
        side = {"ours": ours, "trl": trl}[options.side]
        print(MARK + json.dumps(side(options.size, options.checkpoint, options.steps, options.bf16)), flush=True)
        return
    figures = race(options)
    print(f"\n{figures['size']} {figures['dtype']}, medians of {options.turns}:")
    for name, value in figures["ratios"].items():
        print(f"  {name:24} {value:.2f} {'(ours ÷ TRL)' if name in ('tokens_per_cpu_second', 'peak_memory') else '(TRL ÷ ours)'}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

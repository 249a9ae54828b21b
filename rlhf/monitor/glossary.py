"""Every metric by name: what it is and what to look at. `docs/metrics.md` is this table; a test holds them together."""

from __future__ import annotations

import fnmatch

GLOSSARY: dict[str, tuple[str, str]] = {
    "step": ("number of the step, from 0", ""),
    "reward/mean": ("mean score of the responses that have one", "should rise; the first thing to look at"),
    "reward/std": ("standard deviation of the scores", "0 means nothing to learn from"),
    "reward/min": ("lowest score", ""),
    "reward/max": ("highest score", "below the best possible one for long: the task may be too hard to be found by sampling"),
    "reward/error_rate": ("share of the responses on which the reward function failed", "anything above 0 is a fault to mend"),
    "reward/timeout_rate": ("share of the responses on which the reward function ran out of time", "as above"),
    "reward/abstain_rate": ("share of the responses on which the reward function had no opinion", ""),
    "reward/part/*": ("mean of one component of the reward, unweighted", "which component rises tells what is being learned"),
    "reward/log/*": ("mean of what a reward logged by sample.log", ""),
    "rollout/rows": ("responses of this step", ""),
    "rollout/groups": ("prompts of this step", ""),
    "rollout/episodes": ("episodes of this step; several rows may belong to one", ""),
    "rollout/response_tokens": ("tokens the policy sampled", ""),
    "rollout/prompt_length": ("mean prompt length in tokens", ""),
    "rollout/response_length": ("mean response length in tokens, end token included", "a sudden rise or fall often comes before trouble"),
    "rollout/response_length_min": ("shortest response", "1 is an immediate end token"),
    "rollout/response_length_max": ("longest response", ""),
    "rollout/truncation_rate": ("share of the responses cut off by a limit", "above a few percent: raise max_new_tokens"),
    "rollout/abort_rate": ("share of the responses the engine aborted", "should be 0"),
    "rollout/mixed_version_fraction": ("share of the rows that hold tokens of older weights than the newest", "0 in synchronous training"),
    "group/zero_variance_rate": (
        "share of the groups whose scores are all equal",
        "near 1 nothing is learned: prompts too easy or too hard",
    ),
    "kl/reference_k1": ("mean log-ratio of policy to reference, nats per token", "grows slowly; jumps mean instability"),
    "kl/reference_k3": ("the same by the k3 estimate, never negative", "as above"),
    "kl/coef": ("coefficient of the KL penalty in the reward", "moves under AdaptiveKL"),
    "mismatch/engine_abs_logratio": (
        "mean absolute difference of the log-probabilities of trainer and engine",
        "above 0.05: engine and trainer disagree",
    ),
    "experience/trained_tokens": ("tokens with a loss weight", "0 means this step trained nothing"),
    "advantage/mean": ("mean advantage over sampled tokens", "about 0"),
    "advantage/std": ("standard deviation of the advantages", "1 when whitened"),
    "actor/loss": (
        "what was minimised: surrogate, entropy, KL and router terms",
        "near 0 on-policy by construction; look at the reward instead",
    ),
    "actor/policy_loss": ("the surrogate alone", "as above"),
    "actor/entropy": ("mean entropy of the sampling distribution, nats per token", "towards 0: the policy no longer explores"),
    "actor/clip_fraction": ("share of the tokens whose ratio is clipped", ".05–.3 is usual with several epochs; 0 with one"),
    "actor/clip_fraction_low": ("of these, ratios below 1 − low", ""),
    "actor/clip_fraction_high": ("of these, ratios above 1 + high", ""),
    "actor/clip_fraction_dual": ("share of the tokens bounded by dual_clip", ""),
    "actor/kl_old": ("KL of the policy being trained to the one that started the update, k3", "above .05: fewer epochs or a lower rate"),
    "actor/kl_reference": ("KL term of the loss, before its coefficient", ""),
    "actor/ratio_mean": ("mean probability ratio", "1"),
    "actor/ratio_max": ("largest probability ratio", "≫ 10 with few steps: engine and trainer disagree"),
    "actor/nll": ("supervised: negative log-likelihood, nats per token", "should fall"),
    "actor/router_loss": (
        "mixtures of experts: load-balancing loss before its coefficient",
        "k experts a token: k is even, more is uneven",
    ),
    "actor/grad_norm": ("norm of the gradient before clipping", "spikes come before collapse"),
    "actor/lr": ("learning rate", ""),
    "actor/skipped_steps": ("optimiser steps left out for a gradient that is not finite", "should be 0"),
    "critic/loss": ("what was minimised", "falls, then follows the policy"),
    "critic/value_loss": ("mean squared error times coef", "as above"),
    "critic/clip_fraction": ("share of the tokens whose clipped error is the larger", ""),
    "critic/value_mean": ("mean predicted value", "should come near critic/return_mean"),
    "critic/return_mean": ("mean return", ""),
    "critic/error_abs": ("mean absolute difference of value and return", "should fall"),
    "critic/explained_variance": ("1 − Var(return − value) / Var(return), before the update", "towards 1; below 0 the critic harms"),
    "critic/router_loss": (
        "mixtures of experts: load-balancing loss before its coefficient",
        "k experts a token: k is even, more is uneven",
    ),
    "critic/grad_norm": ("norm of the gradient before clipping", ""),
    "critic/lr": ("learning rate", ""),
    "critic/skipped_steps": ("optimiser steps left out for a gradient that is not finite", "should be 0"),
    "time/rollout": ("seconds of sampling", "usually the largest part"),
    "time/sync": ("seconds of handing weights to the engine", "0 where they are shared"),
    "time/reward": ("seconds of judging", "large: slow verifier"),
    "time/logprobs": ("seconds of the passes of actor, reference and critic over the rollout", ""),
    "time/update": ("seconds of the updates", ""),
    "time/eval": ("seconds of evaluation", ""),
    "time/step": ("seconds of the whole step", ""),
    "throughput/tokens_per_second": ("sampled tokens per second of the whole step", ""),
    "eval/*/mean": ("mean score on a named set", "what counts"),
    "eval/*/part/*": ("mean of one component of the reward there, unweighted", ""),
    "eval/*/pass@*": ("chance that at least one of k responses is right, unbiased estimate", ""),
    "eval/*/response_length": ("mean response length there", ""),
    "eval/*/truncation_rate": ("share of the responses cut off there", ""),
    "eval/*/error_rate": ("share of the responses there on which the reward function failed", "should be 0"),
}


def describe(name: str) -> tuple[str, str] | None:
    """What a metric is and what to look at; None for a name that is not in the glossary."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    return next((entry for pattern, entry in GLOSSARY.items() if "*" in pattern and fnmatch.fnmatchcase(name, pattern)), None)


def glossary_markdown() -> str:
    """The glossary as the table of docs/metrics.md."""
    lines = ["| name | what it is | what to look at |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {what} | {look} |" for name, (what, look) in GLOSSARY.items())]) + "\n"

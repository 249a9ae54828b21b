"""The public signatures, pinned: a failure here means that users' code may break, and wants a line in CHANGELOG.md.

Names, order, kinds and defaults are pinned; annotations may become more precise.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import rlhf
from rlhf.ppo import Values

SIGNATURES = {
    # pure functions of the mathematics
    "gae": "(rewards, values, mask, *, gamma=1.0, lam=1.0, bootstrap=None)",
    "grpo": "(scores, group, mask, *, scale='std', ddof=1, eps=1e-06)",
    "rloo": "(scores, group, mask)",
    "reinforce_plus_plus": "(rewards, mask, *, gamma=1.0)",
    "remax": "(scores, baselines, mask)",
    "opo": "(scores, group, lengths, mask)",
    "whiten": "(values, mask, *, shift_mean=True)",
    "masked_mean": "(values, mask)",
    "token_weights": "(mask, mode, *, constant=None, tokens=None, sequences=None)",
    "ppo_clip_loss": ("(logprobs, old_logprobs, advantages, mask, *, clip=0.2, dual_clip=None, weights=None, importance_weights=None)"),
    "value_loss": "(values, old_values, returns, mask, *, clip=None, coef=0.5, weights=None)",
    "kl_estimate": "(logprobs, ref_logprobs, estimator='k1', *, mask=None)",
    "pass_at_k": "(correct, total, k)",
    # options
    "GAE": "(gamma=1.0, lam=1.0, whiten=True, bootstrap='none')",
    "GRPO": "(scale='std', ddof=1, eps=1e-06)",
    "RLOO": "()",
    "ReinforcePlusPlus": "(gamma=1.0, whiten=True)",
    "PolicyLoss": (
        "(kind=ppo_clip_loss, clip=0.2, dual_clip=None, aggregate='token-mean', constant=None, entropy_coef=0.0, kl_coef=0.0, "
        "kl_estimator='k3')"
    ),
    "ValueLoss": "(clip=None, coef=0.5, aggregate='token-mean', constant=None)",
    "SupervisedLoss": "(aggregate='token-mean')",
    "KLPenalty": "(coef, estimator='k1')",
    "FixedKL": "(coef)",
    "AdaptiveKL": "(coef, target, horizon)",
    "SamplingParams": (
        "(n=1, max_new_tokens=128, min_new_tokens=0, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, stop=(), stop_token_ids=(), "
        "seed=None)"
    ),
    "LoRA": "(rank=32, alpha=None, target_modules='all-linear')",
    # data and rollout
    "Prompt": "(ids, row, inputs=None)",
    "PromptDataset": (
        "(rows, tokenizer, *, max_prompt_tokens=None, overlong='error', prompt_key='prompt', ground_truth_key='ground_truth', "
        "chat_template_kwargs=None, continue_final_message=False, allow_special_tokens_in_text=False)"
    ),
    "PromptDataset.from_parquet": "(paths, tokenizer, **options)",
    "PromptDataset.from_jsonl": "(paths, tokenizer, **options)",
    "PromptDataset.from_dataset": "(dataset, tokenizer, **options)",
    "PromptDataset.split": "(self, held_out, seed=0)",
    "PromptDataset.loader": "(self, prompts_per_step, *, seed=0, epochs=1, drop_last=True, sampler=None, shuffle=True)",
    "Rollout.build": (
        "(prompt_ids, responses, *, logprobs=None, response_masks=None, temperature=1.0, filtered=False, group=None, episode=None, "
        "weight_version=0, finish_reasons=None, rows=None, tokenizer=None, texts=None, raw_texts=None, extras=None)"
    ),
    "Rollout.from_texts": (
        "(prompts, responses, tokenizer, *, group=None, rows=None, append_eos=True, temperature=1.0, weight_version=-1, extras=None)"
    ),
    "Rollout.select": "(self, indices)",
    "Rollout.concat": "(parts)",
    "Rollout.save": "(self, path)",
    "Rollout.load": "(path)",
    "Rollout.to_pandas": "(self, tokenizer=None)",
    "Rollout.to_dataset": "(self, tokenizer=None)",
    "Rollout.metrics": "(self)",
    "RolloutEngine.generate": "(self, prompts, sampling, *, weights=None)",
    "RolloutEngine.agenerate": "(self, prompts, sampling, *, weights=None)",
    "RolloutEngine.update_weights": "(self, source)",
    "RolloutEngine.sync": "(self, source)",
    "RolloutEngine.sleep": "(self)",
    "RolloutEngine.wake": "(self)",
    "RolloutEngine.close": "(self)",
    "TransformersEngine": (
        "(source, tokenizer=None, *, max_rows=256, max_batch_tokens=262144, max_prefill_tokens=8192, seed=0, progress=True)"
    ),
    "FakeEngine": "(tokenizer=None, responses=('ok',), *, logprob=-1.0)",
    # reward
    "RewardFunction.score": "(self, sample)",
    "RewardFunction.score_group": "(self, samples)",
    "RewardFunction.__call__": "(self, rollout)",
    "Sample.log": "(self, name, value)",
    "Rewards.select": "(self, indices)",
    "Rewards.concat": "(batches)",
    "Rewards.metrics": "(self)",
    "GSM8K": "(mode='strict', format_score=0.0, *, marker='####', name=None, on_error=None)",
    "Router": "(routes, default=None, *, key='data_source', name=None)",
    # experience and learning
    "make_experience": (
        "(rollout, rewards=None, *, actor, reference=None, critic=None, old_logprobs='actor', correction=None, max_staleness=0)"
    ),
    "Experience.with_advantages": "(self, estimator, kl=None)",
    "Experience.select": "(self, indices)",
    "Learner": (
        "(module, *, lr=None, optimizer=None, scheduler=None, max_grad_norm=1.0, micro_batch_tokens=None, gradient_checkpointing=False, "
        "master_weights=True, seed=0, parallel=None, router_loss_coef=None)"
    ),
    "Learner.forward_backward": "(self, batch, loss)",
    "Learner.optim_step": "(self)",
    "Learner.update": "(self, batch, loss, *, epochs=1, mini_batch_size=None)",
    "Actor": "(model, tokenizer=None, *, fp32_head=False, **options)",
    "Actor.from_pretrained": (
        "(path, *, tokenizer=None, lora=None, dtype='float32', attn_implementation=None, device=None, gguf_file=None, quantization=None, "
        "**options)"
    ),
    "Actor.update": "(self, batch, loss=None, *, epochs=1, mini_batch_size=None)",
    "Actor.logprobs": "(self, rollout)",
    "Actor.reference": "(self)",
    "Actor.save_pretrained": "(self, folder, *, merged=False)",
    "Critic": "(model, tokenizer=None, *, head=None, **options)",
    "Critic.from_pretrained": (
        "(path, *, tokenizer=None, lora=None, dtype='float32', attn_implementation=None, device=None, gguf_file=None, quantization=None, "
        "**options)"
    ),
    "Critic.update": "(self, batch, loss=None, *, epochs=1, mini_batch_size=None)",
    "Critic.values": "(self, rollout)",
    "Reference.logprobs": "(self, rollout)",
    "supervised_experience": "(prompts, responses, tokenizer)",
    "OnPolicyLoop.run": "(self, steps=None)",
    "OnPolicyLoop.step": "(self, batch)",
    "OnPolicyLoop.evaluate": "(self)",
}

FIELDS = {
    rlhf.Rollout: (
        "prompt_ids response_ids lengths response_mask logprobs temperature filtered group episode weight_version finish_reasons rows "
        "texts raw_texts extras"
    ),
    rlhf.Rewards: "scores status parts token_scores faults logged episode",
    rlhf.Sample: "prompt response ground_truth row response_ids finish_reason messages raw_response logged",
    rlhf.Experience: (
        "rollout rewards old_logprobs ref_logprobs values last_values loss_weights importance_weights token_rewards advantages returns "
        "extras"
    ),
    rlhf.Turn: "prompt_ids response_ids logprobs weight_version reward finish_reason",
    rlhf.EvalSet: "prompts reward sampling correct_above",
    rlhf.OnPolicyLoop: (
        "engine loader reward actor estimator sampling critic reference kl loss value_loss epochs mini_batch_size critic_warmup "
        "old_logprobs correction max_staleness evals eval_every metrics_file progress steps history evaluations"
    ),
    rlhf.Advantages: "advantages returns",
    rlhf.LossOutput: "loss metrics",
    rlhf.PolicyOutput: "logprobs entropy",
    rlhf.ValueOutput: "values",
    Values: "values last",
}


def _plain(value: Any) -> str:
    """The signature without annotations, a function's default by its name."""
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=_Name(parameter.default.__name__) if inspect.isfunction(parameter.default) else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Name(str):
    __repr__ = str.__str__


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_what_users_rely_on(name: str) -> None:
    value: Any = rlhf
    for part in name.split("."):
        value = getattr(value, part)
    assert _plain(value) == SIGNATURES[name]


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_the_fields_of_a_data_type_are_what_users_rely_on(kind: Any) -> None:
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind) if field.init]
    assert " ".join(names) == FIELDS[kind]


def test_statuses_and_finish_reasons_are_a_closed_set() -> None:
    assert [status.name for status in rlhf.Status] == ["OK", "ABSTAIN", "TIMEOUT", "ERROR"]
    assert [reason.name for reason in rlhf.FinishReason] == ["STOP", "LENGTH", "ABORT", "MAX_TURNS", "ERROR"]

"""Reinforcement learning of language models as a library: hold actor, critic, engine, reward and estimator, and write the loop.

The names below are imported when they are first used, so that `import rlhf` costs nothing and brings neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlhf.version import __version__

_HOMES = {
    "rlhf.errors": (
        "ConfigError",
        "DataError",
        "EngineError",
        "MissingDependencyError",
        "ModelError",
        "RLHFError",
        "RLHFWarning",
        "RewardError",
        "RolloutError",
        "ShapeError",
        "StaleRolloutError",
    ),
    "rlhf.parallel": ("make_accelerator",),
    "rlhf.models": ("load_causal_lm", "load_tokenizer"),
    "rlhf.adapters": ("LoRA",),
    "rlhf.optim": ("adamw", "adamw_8bit", "cosine_decay", "linear_decay", "muon"),
    "rlhf.data": ("Prompt", "PromptDataset", "PromptLoader", "encode_prompt", "gsm8k_to_parquet", "load_gsm8k"),
    "rlhf.rollout": (
        "FakeEngine",
        "FinishReason",
        "ImportanceCorrection",
        "Rollout",
        "RolloutEngine",
        "SamplingParams",
        "TransformersEngine",
        "Turn",
    ),
    "rlhf.learner": ("Learner", "PolicyOutput", "ValueOutput"),
    "rlhf.reward": ("Format", "GSM8K", "RewardFunction", "Rewards", "Router", "Sample", "Status", "verifier"),
    "rlhf.ppo": (
        "GAE",
        "GRPO",
        "RLOO",
        "Actor",
        "AdaptiveKL",
        "Advantages",
        "Critic",
        "Experience",
        "FixedKL",
        "KLPenalty",
        "LossOutput",
        "PolicyLoss",
        "Reference",
        "ReinforcePlusPlus",
        "ValueLoss",
        "gae",
        "grpo",
        "kl_estimate",
        "make_experience",
        "masked_mean",
        "opo",
        "ppo_clip_loss",
        "reinforce_plus_plus",
        "remax",
        "rloo",
        "token_weights",
        "value_loss",
        "whiten",
    ),
    "rlhf.sft": ("SupervisedLoss", "supervised_experience", "train_supervised"),
    "rlhf.monitor": ("EvalSet", "MetricsFile", "pass_at_k"),
    "rlhf.loop": ("OnPolicyLoop",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = (
    "adapters",
    "data",
    "errors",
    "learner",
    "loop",
    "models",
    "monitor",
    "optim",
    "parallel",
    "ppo",
    "reward",
    "rollout",
    "scoring",
    "sft",
)

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"rlhf.{name}")
    raise AttributeError(f"module 'rlhf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


if TYPE_CHECKING:
    from rlhf.adapters import LoRA
    from rlhf.data import Prompt, PromptDataset, PromptLoader, encode_prompt, gsm8k_to_parquet, load_gsm8k
    from rlhf.errors import (
        ConfigError,
        DataError,
        EngineError,
        MissingDependencyError,
        ModelError,
        RewardError,
        RLHFError,
        RLHFWarning,
        RolloutError,
        ShapeError,
        StaleRolloutError,
    )
    from rlhf.learner import Learner, PolicyOutput, ValueOutput
    from rlhf.loop import OnPolicyLoop
    from rlhf.models import load_causal_lm, load_tokenizer
    from rlhf.monitor import EvalSet, MetricsFile, pass_at_k
    from rlhf.optim import adamw, adamw_8bit, cosine_decay, linear_decay, muon
    from rlhf.parallel import make_accelerator
    from rlhf.ppo import (
        GAE,
        GRPO,
        RLOO,
        Actor,
        AdaptiveKL,
        Advantages,
        Critic,
        Experience,
        FixedKL,
        KLPenalty,
        LossOutput,
        PolicyLoss,
        Reference,
        ReinforcePlusPlus,
        ValueLoss,
        gae,
        grpo,
        kl_estimate,
        make_experience,
        masked_mean,
        opo,
        ppo_clip_loss,
        reinforce_plus_plus,
        remax,
        rloo,
        token_weights,
        value_loss,
        whiten,
    )
    from rlhf.reward import GSM8K, Format, RewardFunction, Rewards, Router, Sample, Status, verifier
    from rlhf.rollout import (
        FakeEngine,
        FinishReason,
        ImportanceCorrection,
        Rollout,
        RolloutEngine,
        SamplingParams,
        TransformersEngine,
        Turn,
    )
    from rlhf.sft import SupervisedLoss, supervised_experience, train_supervised

"""It learns: advantages, losses and KL as pure functions; estimators, objectives, actor, critic and experience as objects."""

from rlhf.ppo.advantages import Advantages, gae, grpo, masked_mean, opo, reinforce_plus_plus, remax, rloo, whiten
from rlhf.ppo.critic import Critic, Values
from rlhf.ppo.estimators import GAE, GRPO, RLOO, ReinforcePlusPlus
from rlhf.ppo.experience import Experience, make_experience
from rlhf.ppo.kl import AdaptiveKL, FixedKL, KLController, KLPenalty, kl_estimate, kl_mean
from rlhf.ppo.losses import LossOutput, ppo_clip_loss, token_weights, value_loss
from rlhf.ppo.objectives import PolicyLoss, ValueLoss
from rlhf.ppo.policy import Actor, Reference

__all__ = [
    "GAE",
    "GRPO",
    "RLOO",
    "Actor",
    "AdaptiveKL",
    "Advantages",
    "Critic",
    "Experience",
    "FixedKL",
    "KLController",
    "KLPenalty",
    "LossOutput",
    "PolicyLoss",
    "Reference",
    "ReinforcePlusPlus",
    "ValueLoss",
    "Values",
    "gae",
    "grpo",
    "kl_estimate",
    "kl_mean",
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
]

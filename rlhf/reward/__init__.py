"""It gets judged: reward functions, their composition, and the verifiers that come with the library."""

from rlhf.reward.compose import Router, WeightedSum
from rlhf.reward.format import Format
from rlhf.reward.function import FunctionReward, RewardFunction, verifier
from rlhf.reward.gsm8k import GSM8K
from rlhf.reward.rewards import Fault, Rewards, Status
from rlhf.reward.sample import Sample

__all__ = [
    "GSM8K",
    "Fault",
    "Format",
    "FunctionReward",
    "RewardFunction",
    "Rewards",
    "Router",
    "Sample",
    "Status",
    "WeightedSum",
    "verifier",
]

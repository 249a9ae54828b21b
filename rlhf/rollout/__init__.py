"""Text comes out: the rollout data type, sampling options, and engines that fill the one under the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.rollout.batch import FinishReason, Rollout
from rlhf.rollout.correction import ImportanceCorrection
from rlhf.rollout.engine import EncodedPrompt, RolloutEngine, encode_prompts
from rlhf.rollout.fake import CharCodec, FakeCall, FakeEngine, FakePrompt, FakeResponse
from rlhf.rollout.sampling import SamplingParams
from rlhf.rollout.turns import Turn

__all__ = [
    "CharCodec",
    "EncodedPrompt",
    "FakeCall",
    "FakeEngine",
    "FakePrompt",
    "FakeResponse",
    "FinishReason",
    "ImportanceCorrection",
    "Rollout",
    "RolloutEngine",
    "SamplingParams",
    "TransformersEngine",
    "Turn",
    "encode_prompts",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersEngine":  # brings transformers along, which data and tests of loops can do without
        from rlhf.rollout.transformers_engine import TransformersEngine

        return TransformersEngine
    raise AttributeError(f"module 'rlhf.rollout' has no attribute {name!r}")


if TYPE_CHECKING:
    from rlhf.rollout.transformers_engine import TransformersEngine

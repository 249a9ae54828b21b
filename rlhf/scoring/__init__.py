"""How rows are laid out for a forward pass, and the modules it goes through."""

from rlhf.scoring.layout import LAYOUTS, Pack, PackedBatch, collate, plan_micro_batches
from rlhf.scoring.module import PackedBackbone, ScoringModule, ValueModule, check_readable, packed_batches, token_statistics
from rlhf.scoring.router import load_balancing_loss

__all__ = [
    "LAYOUTS",
    "Pack",
    "PackedBackbone",
    "PackedBatch",
    "ScoringModule",
    "ValueModule",
    "check_readable",
    "collate",
    "load_balancing_loss",
    "packed_batches",
    "plan_micro_batches",
    "token_statistics",
]

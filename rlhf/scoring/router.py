"""The load-balancing loss of mixtures of experts.

Legend: S tokens of a forward pass, padding included, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], readers: Tensor, top_k: int) -> Tensor:
    """How unevenly tokens are spread over experts: k when evenly, up to E.

        E Σₑ fₑ Pₑ,    fₑ: experts chosen that are e, a token and layer;    Pₑ: mean probability of e

    Means are over tokens and layers together, each token as often as rows read it; no gradient flows through fₑ.

    Args:
        router_logits: [S, E] for each layer with experts.
        readers: [S], how many rows read each token; 0 for padding.
        top_k: k.

    Returns:
        0-dim, float32.

    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4–6, with the means of transformers' `load_balancing_loss_func`.
    """
    experts = router_logits[0].shape[-1]
    chosen = probability = torch.zeros(experts, device=readers.device)
    weight = readers.float()
    for logits in router_logits:
        probabilities = torch.softmax(logits.float(), -1)
        selected = probabilities.topk(top_k, -1).indices
        chosen = chosen.index_add(0, selected.flatten(), weight.repeat_interleave(top_k))
        probability = probability + weight @ probabilities
    total = weight.sum() * len(router_logits)
    return experts * (chosen / total) @ (probability / total)

"""Keys and values by slots: every live row owns one slot of preallocated tensors, live rows always come first.

Legend: S slots, C tokens of a slot, n live rows, K key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """A transformers cache in which rows of any length decode side by side, without padding on the left.

    During `prefill` a forward pass over prompts stores their keys and values in given slots; during `decode` one token of each of
    the first n slots is stored at that row's own position, and attention reads the slots up to the longest. Masks are the caller's.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._prefill_slots: Tensor | None = None
        self._rows = torch.empty(0, dtype=torch.int64)
        self._positions = torch.empty(0, dtype=torch.int64)
        self._width = 0

    def prefill(self, slots: Tensor) -> None:
        """The next forward pass holds one prompt for each of `slots` (int64 [N]), right-padded."""
        self._prefill_slots = slots

    def decode(self, rows: Tensor, positions: Tensor, width: int) -> None:
        """The next forward pass holds one token of each of the first n slots, to stand at `positions` (int64 [n]), all below `width`.

        `rows` is arange(n), on the device.
        """
        self._prefill_slots = None
        self._rows, self._positions, self._width = rows, positions, width

    def copy(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy the first `width` tokens of the slots `source` to the slots `target` (int64 [m] both)."""
        for stored in (*self._keys, *self._values):
            stored[target, :, :width] = stored[source, :, :width]

    def resize(self, slots: int, capacity: int, live: int) -> None:
        """Change the number of slots or their length; the first `live` slots keep their content, as far as it fits."""
        kept = min(capacity, self.capacity)
        for layers in (self._keys, self._values):
            for i, old in enumerate(layers):
                layers[i] = _empty(old, slots, capacity)
                layers[i][:live, :, :kept] = old[:live, :, :kept]
        self.slots, self.capacity = slots, capacity

    def free(self) -> None:
        """Let go of the tensors, even where a traceback still holds this cache."""
        self._keys.clear()
        self._values.clear()

    # ---------------------------------------------------------------- what transformers' models call

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, K, tokens, D] of a layer; returns those that attention is to read."""
        if layer_idx == len(self._keys):
            self._keys.append(_empty(key_states, self.slots, self.capacity))
            self._values.append(_empty(value_states, self.slots, self.capacity))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._prefill_slots is not None:
            width = key_states.shape[2]
            keys[self._prefill_slots, :, :width] = key_states
            values[self._prefill_slots, :, :width] = value_states
            return key_states, value_states
        keys[self._rows, :, self._positions] = key_states.squeeze(2)
        values[self._rows, :, self._positions] = value_states.squeeze(2)
        live = len(self._rows)
        return keys[:live, :, : self._width], values[:live, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a prompt starts at position 0, and decoding passes its own positions and masks."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def _empty(like: Tensor, slots: int, capacity: int) -> Tensor:
    # zeros, not empty: a masked position still multiplies its value by 0, and 0 × NaN is NaN
    return torch.zeros(slots, like.shape[1], capacity, like.shape[3], dtype=like.dtype, device=like.device)

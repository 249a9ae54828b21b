"""Batches of prompts in a seeded order, and the place in that order as a state that a run resumes from."""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhf.errors import ConfigError, DataError, RLHFWarning
from rlhf.parallel import num_processes, own_share

if TYPE_CHECKING:
    from rlhf.data.prompts import Prompt, PromptDataset


@runtime_checkable
class PromptSampler(Protocol):
    """Chooses the rows of an epoch and their order.

    An epoch is as long as the sampler makes it: it may leave rows out, repeat them, and a curriculum that wants to decide anew every
    ten steps returns ten steps' worth of indices. It is asked when the first batch of an epoch is drawn, so after the results of the
    epoch before.
    """

    def indices(self, dataset: PromptDataset, epoch: int, seed: int) -> Sequence[int]:
        """Row indices of epoch `epoch` (from 0), in order. All randomness must come from seed, epoch and the sampler's own state."""
        ...


@runtime_checkable
class AdaptiveSampler(PromptSampler, Protocol):
    """A sampler that learns from results, a curriculum. What it learns is part of the loader's state."""

    def update(self, rollout: Any, rewards: Any) -> None:
        """Told the `Rollout` and the `Rewards` of a step; `rollout.rows[i]["uid"]` says which row response i belongs to."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it learned, as JSON can hold it (text keys)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what state_dict gave."""
        ...


class PromptLoader:
    """Batches of prompts, `list[Prompt]`, in an order that depends on seed and epoch alone.

    Several processes draw the same order and each gets its own share of every batch; the state is the same in all of them.

    The loader is an iterator with a place: `for batch in loader` goes on from where it stands, also after a `break` and after
    `load_state_dict`. A fresh loader stands at the beginning. One that has handed out all its epochs stays finished: a further loop
    over it warns and has no turns. Make a new loader to start over, or give `epochs`.

    The place counts batches handed out, whatever becomes of them, so a batch that is dropped downstream is not replayed. State taken
    while batch k is being worked on resumes with batch k + 1; after the last batch of an epoch it is the start of the next one.

    Args:
        dataset: the prompts.
        prompts_per_step: prompts a batch, over all processes.
        seed: of the shuffle; not negative.
        epochs: passes over the data; None for no end.
        drop_last: leave out the rest of an epoch that does not fill a batch, so that all steps are of one size. Which rows these
            are changes with the shuffle. With False the last batch of an epoch may be smaller; use that to evaluate.
        sampler: chooses rows and order instead of the shuffle.
        shuffle: a new order each epoch; False keeps the order of rows.

    Attributes:
        epoch: the epoch, from 0, that the next batch belongs to.
        batches: batches handed out so far, over all epochs.

    Raises:
        ConfigError: an argument is out of range, or a sampler that is told results has no state.
        DataError: with drop_last the data would not fill a single batch.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        prompts_per_step: int,
        *,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = True,
        sampler: PromptSampler | None = None,
        shuffle: bool = True,
    ) -> None:
        for name, value, least in (("prompts_per_step", prompts_per_step, 1), ("seed", seed, 0), ("epochs", epochs, 1)):
            if value is None and name == "epochs":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}{' or None' if name == 'epochs' else ''}, got {value!r}"
                )
        if sampler is not None and not isinstance(sampler, PromptSampler):
            raise ConfigError(f"sampler must have a method indices(dataset, epoch, seed), got {type(sampler).__name__}; see PromptSampler")
        if hasattr(sampler, "update") and not isinstance(sampler, AdaptiveSampler):
            raise ConfigError(
                f"{type(sampler).__name__} has update() but no state_dict() or load_state_dict(), so no run could be resumed; add them"
            )
        rest = 0 if drop_last else len(dataset) % prompts_per_step
        if prompts_per_step < num_processes() or 0 < rest < num_processes():
            raise ConfigError(
                f"every batch must hold a prompt for each of the {num_processes()} processes; got prompts_per_step={prompts_per_step}"
                f"{f' and a last batch of {rest}' if rest else ''}. Take more prompts a step, or drop_last=True"
            )
        if sampler is None and drop_last and len(dataset) < prompts_per_step:
            raise DataError(_too_few(len(dataset), prompts_per_step))
        self.dataset = dataset
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.epochs = epochs
        self.drop_last = drop_last
        self.sampler = sampler
        self.shuffle = shuffle
        self.epoch = 0
        self.batches = 0
        self._batch_in_epoch = 0
        self._order: list[int] | None = None  # of the current epoch, from its first batch to its last

    @property
    def finished(self) -> bool:
        """Whether all epochs have been handed out."""
        return self.epochs is not None and self.epoch >= self.epochs

    def __iter__(self) -> Iterator[list[Prompt]]:
        if self.finished:
            warnings.warn(
                f"this loader has handed out all its batches (epochs={self.epochs}); make a new one to start over, or give more epochs",
                RLHFWarning,
                stacklevel=2,
            )
        return self

    def __next__(self) -> list[Prompt]:
        if self.finished:
            raise StopIteration
        if self._order is None:
            self._order = self._draw_order()
        start = self._batch_in_epoch * self.prompts_per_step
        batch = [self.dataset[index] for index in own_share(self._order[start : start + self.prompts_per_step])]
        self.batches += 1
        self._batch_in_epoch += 1
        if self._batch_in_epoch == self._batches_of(len(self._order)):
            self.epoch, self._batch_in_epoch, self._order = self.epoch + 1, 0, None
        return batch

    def __len__(self) -> int:
        """Batches of all epochs together, those handed out included; a TypeError where there is no end or a sampler decides it."""
        if self.epochs is None or self.sampler is not None:
            raise TypeError(f"a loader with {'epochs=None' if self.epochs is None else 'a sampler'} has no length")
        return self.epochs * self._batches_of(len(self.dataset))

    def __repr__(self) -> str:
        epochs = "" if self.epochs is None else f" of {self.epochs}"
        place = f"{self.batches} batches handed out, epoch {self.epoch}{epochs}"
        return f"PromptLoader({self.prompts_per_step} of {len(self.dataset)} prompts a step, {place})"

    def update(self, rollout: Any, rewards: Any) -> None:
        """Tells a sampler that learns the results of a step; nothing happens without one."""
        if isinstance(self.sampler, AdaptiveSampler):
            self.sampler.update(rollout, rewards)

    def state_dict(self) -> dict[str, Any]:
        """The place, as JSON can hold it: seed, epoch, batches handed out, sizes, the dataset's fingerprint, the sampler's state.

        Raises:
            ConfigError: the sampler's state is not JSON.
        """
        sampler_state = None
        if (give := getattr(self.sampler, "state_dict", None)) is not None:
            try:
                sampler_state = json.loads(json.dumps(give()))  # a copy, and what a file would give back
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"the state of {type(self.sampler).__name__} must be JSON ({error}); use lists, numbers and text"
                ) from error
        return {
            **self._identity(),
            "epoch": self.epoch,
            "batch_in_epoch": self._batch_in_epoch,
            "batches": self.batches,
            # The shuffle can be drawn again from seed and epoch; a sampler has learned since it chose this epoch's order.
            "order": None if self.sampler is None or self._order is None else list(self._order),
            "sampler_state": sampler_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place; the batches from there on are those of the run that was saved. More epochs than then are welcome.

        Raises:
            ConfigError: the state is of other data, another seed, other sizes or another sampler; names all that differ, and leaves
                the loader as it was.
        """
        expected = self._identity()
        wanted = [*expected, "epoch", "batch_in_epoch", "batches", "order", "sampler_state"]
        if missing := [key for key in wanted if key not in state]:
            raise ConfigError(f"this is not the state of a PromptLoader: it lacks {', '.join(missing)}; pass what state_dict() returned")
        different = [f"{key} was {state[key]!r} and is {value!r}" for key, value in expected.items() if state[key] != value]
        if different:
            raise ConfigError(
                f"the saved state does not fit this loader: {'; '.join(different)}; resume with the data and settings of the saved run"
            )
        if state["sampler_state"] is not None and (take := getattr(self.sampler, "load_state_dict", None)) is not None:
            take(state["sampler_state"])
        self.epoch, self.batches, self._batch_in_epoch = state["epoch"], state["batches"], state["batch_in_epoch"]
        self._order = None if state["order"] is None else list(state["order"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "prompts_per_step": self.prompts_per_step,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "sampler": None if self.sampler is None else type(self.sampler).__name__,
            "rows": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
        }

    def _batches_of(self, rows: int) -> int:
        return rows // self.prompts_per_step if self.drop_last else -(-rows // self.prompts_per_step)

    def _draw_order(self) -> list[int]:
        if self.sampler is not None:
            return self._ask_sampler(self.sampler)
        if not self.shuffle:
            return list(range(len(self.dataset)))
        import numpy

        # A generator of its own: neither the global random state nor how often it was used changes the order.
        return numpy.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset)).tolist()

    def _ask_sampler(self, sampler: PromptSampler) -> list[int]:
        name = type(sampler).__name__
        try:
            order = [operator.index(index) for index in sampler.indices(self.dataset, self.epoch, self.seed)]
        except TypeError as error:
            raise DataError(f"{name}.indices must return row indices, whole numbers ({error})") from error
        if outside := [index for index in order if not 0 <= index < len(self.dataset)]:
            raise DataError(f"{name}.indices returned {outside[0]} in epoch {self.epoch}; row indices go from 0 to {len(self.dataset) - 1}")
        if not self._batches_of(len(order)):
            raise DataError(f"{name}.indices in epoch {self.epoch}: {_too_few(len(order), self.prompts_per_step)}")
        return order


def _too_few(rows: int, prompts_per_step: int) -> str:
    return f"{rows} rows do not fill a batch of prompts_per_step={prompts_per_step}; lower it, or take a smaller batch with drop_last=False"

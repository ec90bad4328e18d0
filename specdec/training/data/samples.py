"""What is learnt from one text: its token ids, and which of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import torch

__all__ = ["MIN_TOKENS", "Collate", "MalformedError", "Sample", "SampleSequence", "Samples", "UnusableError", "collate"]
__all__ += ["masked", "split_held_out", "token_counts"]

Collate: TypeAlias = "Callable[[Sequence[Sample]], dict[str, torch.Tensor]]"
"""Makes a batch of texts."""

MIN_TOKENS = 8
"""Shorter texts are left out: the deepest head would have nothing to guess."""


class UnusableError(ValueError):
    """A text that cannot be learnt from, for a reason that is counted.

    Args:
        reason: what ends a sentence that begins with "a text ...".
        detail: what differs from text to text.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class MalformedError(UnusableError):
    """A row that lacks what its form needs, or has something else in its place; the file may be another than meant."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One text.

    Attributes:
        tokens: [T] int64.
        loss_mask: [T] bool, tokens that may be learnt.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that may be learnt; what an evaluation starts from."""
        return int(self.loss_mask.int().argmax())


class Samples(torch.utils.data.Dataset[Sample]):
    """Samples as the trainer wants them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def masked(tokens: Sequence[int], spans: Iterable[tuple[int, int]]) -> Sample:
    """A text of which the tokens of the spans, from the first of each to before its last, may be learnt."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    for first, last in spans:
        mask[first:last] = True
    return Sample(torch.tensor(tokens, dtype=torch.int64), mask)


class SampleSequence(Sequence[Sample], ABC):
    """Samples that are made, or fetched from a file, one at a time; a slice fetches none."""

    @abstractmethod
    def at(self, place: int) -> Sample:
        """The sample at a place from 0 to below the length."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        places = range(len(self))[index]
        return self.at(places) if isinstance(places, int) else _Chosen(self, places)


class _Chosen(SampleSequence):
    """Some of other samples, which stay where they are: on disk, where that is so."""

    def __init__(self, samples: Sequence[Sample], places: Sequence[int]) -> None:
        self._samples = samples
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def at(self, place: int) -> Sample:
        return self._samples[self._places[place]]


def split_held_out(samples: Sequence[Sample], fraction: float, seed: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Shuffle and split into what is trained on and what is held out, at least one text each.

    Raises:
        ValueError: fewer than two texts, or a fraction outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise ValueError(f"held_out: expected a part of the texts between 0 and 1, or a file, got {fraction}")
    if len(samples) < 2:
        raise ValueError(f"data: expected at least 2 usable texts, one of them to hold out, got {len(samples)}")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(fraction * len(samples))), len(samples) - 1)
    return _Chosen(samples, order[count:]), _Chosen(samples, order[:count])


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """A batch, right-padded: `input_ids` [B, T] int64 and `loss_mask` [B, T] bool."""
    width = max(sample.tokens.shape[0] for sample in samples)
    tokens = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : sample.tokens.shape[0]] = sample.tokens
        mask[row, : sample.tokens.shape[0]] = sample.loss_mask
    return {"input_ids": tokens, "loss_mask": mask}


def token_counts(samples: Sequence[Sample], vocab_size: int) -> torch.Tensor:
    """[V] int64: how often each token is to be learnt."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.tokens[sample.loss_mask], minlength=vocab_size)
    return counts

"""Texts to learn from: files of several forms, as token ids with a mask of what may be learnt.

JSON lines, one text per line, in any of these forms (also mixed):

    {"text": "..."}                                     all of it is learnt
    {"prompt": "...", "completion": "..."}              the completion is learnt
    {"tokens": [...], "prompt_length": 12}              as `specdec distill` writes them; wins over text beside it
    {"tokens": [...], "spans": [[12, 40], [61, 90]]}    the spans are learnt: from the first of each to before its last
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}     (ShareGPT)

Conversations go through the tokenizer's chat template, and what the assistant says is learnt. A `.pt` file holds token
ids: a [N, T] tensor or a list of 1-D tensors.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.models.target.target import Target
from specdec.training.data.files import rows_of
from specdec.training.data.rows import sample_of
from specdec.training.data.samples import MIN_TOKENS, Sample, UnusableError, split_held_out

__all__ = ["Texts", "read_samples"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to learn from and to hold out.

    Attributes:
        source: a file, or samples.
        held_out: a file or samples to evaluate on, or the part of `source` that is kept for it.
        tokenizer: the target's; not needed where files hold token ids.
        max_length: tokens at which texts are cut off; by default 2048 or the target's context.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
    """

    source: str | Path | Sequence[Sample]
    held_out: str | Path | Sequence[Sample] | float = 0.05
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    chat_template: str | None = None

    def read(self, target: Target, seed: int) -> tuple[list[Sample], list[Sample]]:
        """What is trained on, and what is held out.

        Raises:
            ValueError: bad limits, malformed files, or too few usable texts.
        """
        longest = min(2048, target.max_positions) if self.max_length is None else self.max_length
        if not 1 <= longest <= target.max_positions:
            raise ValueError(f"max_length: expected 1 to {target.max_positions}, the target's context, got {longest}")

        def samples(source: str | Path | Sequence[Sample]) -> list[Sample]:
            if not isinstance(source, str | Path):
                return list(source)
            return read_samples(
                Path(source),
                self.tokenizer,
                max_length=longest,
                vocab_size=target.vocab_size,
                chat_template=self.chat_template,
            )

        train = samples(self.source)
        if isinstance(self.held_out, int | float):
            return split_held_out(train, self.held_out, seed)
        held_out = samples(self.held_out)
        if not train or not held_out:
            raise ValueError(f"data: expected texts to train on and to hold out, got {len(train)} and {len(held_out)}")
        return train, held_out


def read_samples(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    vocab_size: int,
    chat_template: str | None = None,
) -> list[Sample]:
    """Read all usable texts of a file.

    Args:
        path: `.jsonl` or `.pt`.
        tokenizer: the target's; not needed where the file holds token ids.
        max_length: longer texts are cut off.
        vocab_size: the target's; ids beyond it are refused.
        chat_template: Jinja template for conversations; the tokenizer's own by default.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed line, by number, or no usable text at all, with the reasons.
    """
    samples, reasons, count = [], Counter[str](), 0
    for place, row in rows_of(path):
        count += 1
        try:
            sample = sample_of(row, tokenizer, chat_template)
            samples.append(_cut(sample, max_length, vocab_size))
        except UnusableError as error:
            reasons[str(error)] += 1
        except ValueError as error:
            raise ValueError(f"{path}{place}: {error}") from error
    for reason, number in reasons.items():
        logger.warning("%s: left out %d of %d texts: %s", path, number, count, reason)
    if not samples:
        why = "; ".join(f"{number} {reason}" for reason, number in reasons.items()) or "the file is empty"
        raise ValueError(f"data: expected at least one usable text in {path}, got none of {count}: {why}")
    return samples


def _cut(sample: Sample, max_length: int, vocab_size: int) -> Sample:
    """The beginning of a text, if there is something to learn in it."""
    tokens, mask = sample.tokens[:max_length], sample.loss_mask[:max_length]
    if tokens.shape[0] < MIN_TOKENS:
        raise UnusableError(f"shorter than {MIN_TOKENS} tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}")
    if not mask[2:].any():  # the first token that any drafter guesses is the one after the root
        raise UnusableError(f"with nothing to learn in the first {max_length} tokens")
    return Sample(tokens, mask)

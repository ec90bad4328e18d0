"""Texts that were tokenised once are read from a file the next time, and by all processes from the same memory.

The file lies beside the data as `.NAME.<key>.tokens`, or in the user's cache where that folder cannot be written to and
for data sets of the hub. Its key is a hash of everything that decides what is in it: the data, the tokenizer, the chat
template and the limits. So a stale one is never read; it is removed when its successor is written. The first of several
processes writes it, while the others wait. It is mapped into memory, so that their copies are one.

The file is in the safetensors format: `tokens` [sum T] int32, `loss_mask` [sum T] bool, `ends` [N] int64, and as
metadata the counts of a `Reading` and the hash of the data.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedTokenizerBase

from specdec.common.files import cache_folder, replace_file
from specdec.training.data.files import data_hash, hub_name
from specdec.training.data.left_out import Reading, Reason
from specdec.training.data.samples import Sample, SampleSequence

__all__ = ["CACHED_BYTES", "cached_reading"]

logger = logging.getLogger(__name__)

CACHED_BYTES = 1 << 20
"""Smaller files are read anew each time, which takes a second or two and leaves nothing behind."""

_FORMAT = 1  # to be raised when other tokens or masks are made of the same data
_ENDING = ".tokens"


class _StoredSamples(SampleSequence):
    """Samples in a file that is mapped into memory."""

    def __init__(self, tokens: torch.Tensor, loss_mask: torch.Tensor, ends: list[int]) -> None:
        self._tokens = tokens
        self._loss_mask = loss_mask
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def at(self, place: int) -> Sample:
        span = slice(self._ends[place - 1] if place else 0, self._ends[place])
        return Sample(self._tokens[span].to(torch.int64), self._loss_mask[span].clone())


def cached_reading(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    limits: dict[str, int],
    chat_template: str | None,
    read: Callable[[], Reading],
) -> Reading:
    """What `read` makes of a file or data set, from the cache where it is there, and into it where not.

    Args:
        source: a file or a data set of the hub; small files, token ids and what needs no tokenizer are not cached.
        tokenizer: the target's.
        limits: numbers that decide what is kept of a text.
        chat_template: Jinja template; the tokenizer's own by default.
        read: reads all of it.
    """
    is_small = not hub_name(source) and Path(source).is_file() and Path(source).stat().st_size < CACHED_BYTES
    is_missing = not hub_name(source) and not Path(source).is_file()
    if tokenizer is None or not tokenizer.is_fast or is_small or is_missing or Path(source).suffix == ".pt":
        return read()
    content = data_hash(source)
    file = _place(source, _key(content, tokenizer, limits, chat_template))
    if (stored := _load(file)) is not None:
        return stored
    with _locked(file):
        if (stored := _load(file)) is not None:  # another process has written it meanwhile
            return stored
        reading = read()
        try:
            _write(file, reading, content)
        except OSError as error:
            logger.warning("%s: the tokens could not be kept in %s: %s", source, file, error)
            return reading
    return _load(file) or reading


def _key(content: str, tokenizer: PreTrainedTokenizerBase, limits: dict[str, int], chat_template: str | None) -> str:
    """A hash of all that decides what is made of the data."""
    template = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
    versions = [_FORMAT, transformers.__version__]
    parts = [versions, content, limits, template, {name: str(token) for name, token in _special_tokens(tokenizer)}]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:16]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, object]]:
    yield from tokenizer.special_tokens_map.items()


def _place(source: str | Path, key: str) -> Path:
    """Where the tokens of a source are kept."""
    path = Path(source)
    folder = path.absolute().parent
    if hub_name(source) or not os.access(folder, os.W_OK):
        folder = cache_folder() / "tokens"
    return folder / f".{path.as_posix().replace('/', '-') if hub_name(source) else path.name}.{key}{_ENDING}"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time; the lock's file goes with the last one."""
    lock = file.with_name(file.name + ".lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock)
        held.acquire()
    except OSError as error:  # a file system without locks: each process reads for itself
        logger.warning("%s: no lock, each process reads the data itself: %s", file, error)
        yield
        return
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


def _load(file: Path) -> Reading | None:
    """What is in the file; None if it is not there, or broken."""
    try:
        with safe_open(file, framework="pt") as stored:
            counts = json.loads(stored.metadata()["made"])
            tokens, loss_mask, ends = (stored.get_tensor(name) for name in ("tokens", "loss_mask", "ends"))
        if not tokens.shape == loss_mask.shape == (int(ends[-1]) if len(ends) else 0,):
            return None
        del counts["data"]
        counts["left_out"] = tuple(Reason(**reason) for reason in counts["left_out"])
        return Reading(samples=_StoredSamples(tokens, loss_mask, ends.tolist()), **counts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _write(file: Path, reading: Reading, content: str) -> None:
    """Write the file in one step, and remove those that were made of other data of the same name."""
    texts = [sample.tokens.to(torch.int32) for sample in reading.samples]
    masks = [sample.loss_mask for sample in reading.samples]
    tensors = {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *texts]),
        "loss_mask": torch.cat([torch.zeros(0, dtype=torch.bool), *masks]),
        "ends": torch.tensor([len(text) for text in texts], dtype=torch.int64).cumsum(0),
    }
    replace_file(file, save(tensors, {"made": json.dumps({**_counts(reading), "data": content})}))
    name = re.escape(file.name.removesuffix(_ENDING).rpartition(".")[0])
    made_of_the_name = re.compile(rf"{name}\.[0-9a-f]{{16}}{re.escape(_ENDING)}")
    for other in file.parent.iterdir():
        if made_of_the_name.fullmatch(other.name) and _data_of(other) != content:
            other.unlink(missing_ok=True)


def _counts(reading: Reading) -> dict[str, object]:
    left_out = [asdict(reason) for reason in reading.left_out]
    names = ("num_rows", "num_cut", "num_answers", "num_hidden")
    return {**{name: getattr(reading, name) for name in names}, "left_out": left_out}


def _data_of(file: Path) -> str | None:
    """The hash of the data that a file was made of."""
    try:
        with safe_open(file, framework="pt") as stored:
            return str(json.loads(stored.metadata()["made"])["data"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None

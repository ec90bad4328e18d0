"""Which files of other people can be read, and by what: one reader a kind."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.models.networks.base import DraftNetwork
from specdec.models.published import dflash, dspark, eagle, falcon, hydra, medusa, mtp, peagle

__all__ = ["READERS", "Reader", "reader_of", "recognise"]


@dataclass(frozen=True, slots=True)
class Reader:
    """How the published files of a kind are read.

    Attributes:
        recognises: whether tensors of these names, beside a `config.json` of this content, are of this kind.
        read: a network from the tensors by name and the content of the `config.json`, which is empty if there is none.
        embedding: name under which files hold an input embedding, which tells their base model.
        lm_head: name under which files may hold a copy of the target's LM head.
        copies: of tensors of these names, which ought to be copies of the target's, and of what: its "embedding" or its
            "LM head"; they are not read.
    """

    recognises: Callable[[set[str], Mapping[str, Any]], bool]
    read: Callable[..., DraftNetwork]
    embedding: str | None = None
    lm_head: str | None = None
    copies: Callable[[set[str], Mapping[str, Any]], Mapping[str, str]] | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings with which files can be read."""
        return tuple(name for name in inspect.signature(self.read).parameters if name not in ("tensors", "config"))


READERS = {
    "medusa": Reader(medusa.recognises, medusa.read),
    "hydra": Reader(hydra.recognises, hydra.read),
    "peagle": Reader(peagle.recognises, peagle.read, peagle.EMBEDDING),
    "eagle3": Reader(eagle.recognises_third, eagle.read, eagle.EMBEDDING),
    "eagle": Reader(eagle.recognises, eagle.read, eagle.EMBEDDING),
    "falcon": Reader(falcon.recognises, falcon.read, falcon.EMBEDDING),
    "mtp": Reader(mtp.recognises, mtp.read, copies=mtp.copies),
    "dspark": Reader(dspark.recognises, dspark.read, dspark.EMBEDDING, dspark.HEAD),
    "dflash": Reader(dflash.recognises, dflash.read, dflash.EMBEDDING, dflash.HEAD),
}
"""By the kind of drafter; the first one that recognises a file reads it."""


def reader_of(kind: str) -> Reader:
    """The reader of a kind.

    Raises:
        NotImplementedError: not every method has published files.
    """
    name = kind.removesuffix("++")  # files of Hydra++ are Hydra's
    if name not in READERS:
        raise NotImplementedError(f"{kind}: no published layout is known")
    return READERS[name]


def recognise(names: set[str], config: Mapping[str, Any]) -> str | None:
    """The kind of a file with tensors of these names, beside a `config.json` of this content; None if unknown."""
    return next((kind for kind, reader in READERS.items() if reader.recognises(names, config)), None)

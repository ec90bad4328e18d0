"""What the trained networks of all drafters have in common: a configuration, names of tensors, and strict loading.

A network's `state_dict` holds what the method trains and nothing else. What it shares with the target (embedding, LM
head) is handed in when a drafter is bound to its target, and is never saved with it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from specdec.kernels.common.launch import Backend

__all__ = ["DraftNetwork", "OwnVocabulary", "check_mask_token", "check_target_width", "check_tensors"]
__all__ += ["draft_vocabulary_size", "load_strictly"]


class DraftNetwork(nn.Module):
    """Base of the draft networks.

    Attributes:
        config_class: frozen dataclass of the network's sizes and switches; JSON-serialisable with `asdict`.
        config: an instance of it.
        trains_embedding: whether an embedding of its own is trained; few rows need not tell it from the target's.
        backend: what runs its kernels; by default decided by the device. Set when a drafter is bound to its target.
    """

    config_class: ClassVar[type]
    config: Any
    trains_embedding: ClassVar[bool] = False
    backend: Backend | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def share_embedding(self) -> None:
        """Give up an embedding of its own, if it has one: it was found to equal the target's."""

    def share_lm_head(self) -> None:
        """Give up an LM head of its own, if it has one: it was found to equal the target's."""

    def check_fits(self, *, vocab_size: int, hidden_size: int) -> None:
        """Raise ValueError unless the network belongs to a target of these sizes (those that its config sets)."""
        for name, expected in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
            got = getattr(self.config, name, None)
            if got not in (None, expected):
                raise ValueError(f"drafter: expected {name} {expected} as the target's, got {got}")


def draft_vocabulary_size(size: int | None, vocab_size: int, *, shares_lm_head: bool) -> int:
    """Tokens that a network proposes from: `size`, or all of the target's.

    Raises:
        ValueError: a size out of range, or of fewer tokens than the LM head has that is shared.
    """
    size = vocab_size if size is None else size
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size: expected 1 to {vocab_size}, the target's vocabulary, got {size}")
    if shares_lm_head and size != vocab_size:
        raise ValueError(f"shares_lm_head: expected False with a draft vocabulary of {size} tokens, got True")
    return size


def check_mask_token(token: int, vocab_size: int) -> None:
    """Raise ValueError for a mask that is no token."""
    if not 0 <= token < vocab_size:
        raise ValueError(f"mask_token_id: expected a token below {vocab_size}, the vocabulary's size, got {token}")


def check_target_width(config: Any) -> None:
    """Raise ValueError for a network narrower or wider than the target that shares its embedding or LM head."""
    width, hidden_size = config.target_hidden_size, config.hidden_size
    if width not in (None, hidden_size) and (config.shares_lm_head or not config.own_embedding):
        raise ValueError(
            f"target_hidden_size: expected {hidden_size}, the network's hidden_size, where it shares the "
            f"target's embedding or LM head, got {width}"
        )


class OwnVocabulary(DraftNetwork):
    """A network that may have an embedding, an LM head and a vocabulary of its own; its `config` says which, and sizes.

    Attributes:
        embed_tokens: its own embedding; None where it is the target's.
        lm_head: its own LM head; None where it is the target's.
        d2t: [num_draft_tokens] int64, what to add to a token of the draft vocabulary; absent where it is the target's.
        t2d: [vocab_size] bool, whether the draft vocabulary has a token; absent likewise.
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: torch.Tensor
    t2d: torch.Tensor

    def add_vocabulary(self) -> None:
        """Make the tables: the first tokens, until `set_draft_vocabulary` says which."""
        if self.has_own_vocabulary:
            size, vocab_size = self.config.num_draft_tokens, self.config.vocab_size
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocab_size) < size)

    def check_fits(self, *, vocab_size: int, hidden_size: int) -> None:
        """As `DraftNetwork`; the states that are read may be wider than the network."""
        width = self.config.target_hidden_size
        if width not in (None, hidden_size):
            raise ValueError(f"drafter: expected target_hidden_size {hidden_size} as the target's, got {width}")
        own_width = hidden_size if width is None else int(self.config.hidden_size)
        super().check_fits(vocab_size=vocab_size, hidden_size=own_width)

    def share_embedding(self) -> None:
        """As `DraftNetwork`."""
        self.embed_tokens = None
        self.config = replace(self.config, own_embedding=False)

    def share_lm_head(self) -> None:
        """As `DraftNetwork`."""
        self.lm_head = None
        self.config = replace(self.config, shares_lm_head=True)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """Begin training with the target's weights, as far as the network has some of its own in their place.

        Args:
            lm_head: [V, C] the target's LM head; the rows of the draft vocabulary are taken.
            embedding: [V, C] the target's input embedding.
        """
        if self.lm_head is not None:
            self.lm_head.weight.copy_(lm_head[self.target_ids.to(lm_head.device)])
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(embedding)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether it proposes from fewer tokens than the target has."""
        return bool(self.config.num_draft_tokens < self.config.vocab_size)

    @property
    def target_ids(self) -> torch.Tensor:
        """[num_draft_tokens] int64, the target's id of each token of the draft vocabulary."""
        device = next(self.parameters()).device
        ids = torch.arange(self.config.num_draft_tokens, device=device)
        return ids + self.d2t if self.has_own_vocabulary else ids

    @torch.no_grad()
    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Choose the tokens that it can propose.

        Args:
            target_ids: [num_draft_tokens] distinct ids of the target's vocabulary, in any order.

        Raises:
            ValueError: another number of ids, an id twice, or one that the target does not have.
        """
        size, vocab_size = self.config.num_draft_tokens, self.config.vocab_size
        ids = torch.as_tensor(target_ids, dtype=torch.int64).cpu().sort().values
        if not self.has_own_vocabulary:
            raise ValueError(f"draft_tokens: expected None without a draft vocabulary, got {ids.numel()} ids")
        if ids.shape != (size,) or ids.unique().numel() != size or ids[0] < 0 or ids[-1] >= vocab_size:
            raise ValueError(
                f"draft_tokens: expected {size} distinct ids below {vocab_size}, got {ids.numel()} "
                f"({ids.unique().numel()} distinct)"
            )
        self.d2t.copy_(ids - torch.arange(size))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True


def check_tensors(
    expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, ignored: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError for missing, unexpected or misshapen tensors, by name; `ignored` ones may be there."""
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys() - ignored)
    if missing or unexpected:
        raise ValueError(f"checkpoint: missing tensors {missing}, unexpected tensors {unexpected}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(tensors[name].shape)}")


def load_strictly(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *, ignored: frozenset[str] = frozenset()
) -> None:
    """Copy `tensors` into `module`, all of them and no others.

    Args:
        module: receives them; its parameters take the tensors' dtype.
        tensors: by name.
        ignored: names that may be there and are not used.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, by name.
    """
    expected = module.state_dict()
    check_tensors(expected, tensors, ignored=ignored)
    module.load_state_dict({name: tensors[name] for name in expected}, assign=True)

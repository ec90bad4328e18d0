"""Draft vocabularies in other people's files: `d2t`, what to add to a token, and `t2d`, which tokens there are."""

from collections.abc import MutableMapping

import torch

from specdec.models.networks.base import OwnVocabulary

__all__ = ["check_tables", "complete_tables"]


def complete_tables(tensors: MutableMapping[str, torch.Tensor], vocab_size: int, draft_vocab_size: int) -> None:
    """Make the tables of the draft vocabulary what a network wants: `t2d` follows from `d2t`, and may be absent.

    Raises:
        ValueError: `d2t` leads out of the vocabulary, or to a token twice.
    """
    if draft_vocab_size == vocab_size:  # nothing to map
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" not in tensors:
            ids = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
            if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != ids.numel():
                raise ValueError(
                    f"d2t: expected offsets that lead to distinct tokens below {vocab_size}, got "
                    f"{ids.unique().numel()} of {ids.numel()} from {int(ids.min())} to {int(ids.max())}"
                )
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if "t2d" in tensors:
        tensors["t2d"] = tensors["t2d"].bool()


def check_tables(network: OwnVocabulary) -> None:
    """Refuse tables that contradict each other; `d2t` read as ids instead of offsets would show here.

    Raises:
        ValueError: `d2t` does not lead to the tokens that `t2d` marks.
    """
    if not network.has_own_vocabulary:
        return
    ids = network.target_ids
    if not torch.equal(ids.sort().values, network.t2d.nonzero()[:, 0]):
        raise ValueError(
            f"d2t: expected offsets that lead to the {int(network.t2d.sum())} tokens marked in t2d, got "
            f"ids from {int(ids.min())} to {int(ids.max())}"
        )

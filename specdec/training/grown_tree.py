"""A trained drafter's tree, grown on texts that it was not trained on, from the states that were kept of them.

Greedy texts are needed: growth simulates greedy decoding (`specdec.tuning.growth`). Which of the kept texts are, their
best tokens tell. The target runs no pass: its states are looked up.
"""

from collections.abc import Sequence

import torch

from specdec.drafting.base import Drafter
from specdec.evaluation.replay import RecordedTarget, RecordedText, Recording
from specdec.models.target.target import Target
from specdec.training.data import Sample
from specdec.training.states import StateStore
from specdec.trees.shape import TreeShape
from specdec.tuning.growth import grow
from specdec.tuning.ranks import rank_texts

__all__ = ["grown_tree"]


def grown_tree(
    target: Target,
    drafter: Drafter,
    store: StateStore,
    samples: Sequence[Sample],
    *,
    num_nodes: int,
    depth: int,
    num_tokens: int = 64,
    batch_size: int = 16,
) -> TreeShape:
    """Grow a tree on the beginnings of greedy answers.

    Args:
        target: the target.
        drafter: bound to the target; its own tree does not matter.
        store: has read the texts, with the layers that the drafter taps.
        samples: the texts; those that are not greedy or shorter are passed over.
        num_nodes: of the tree, root included; fewer where these texts would take no more.
        depth: of the tree.
        num_tokens: of each answer.
        batch_size: texts at a time.

    Raises:
        ValueError: no text is left, or the drafter ranks no candidates.
    """
    kept = [_recorded(store, sample, num_tokens) for sample in samples]
    texts = tuple(text for text in kept if text is not None)
    if not texts:
        raise ValueError(f"samples: expected greedy answers of {num_tokens} tokens, got none in {len(samples)} texts")
    recorded = RecordedTarget(target, Recording(texts, num_tokens, (), store.tap_layers))
    prompts, answers = [text.prompt for text in texts], [text.new.tolist() for text in texts]
    ranks = rank_texts(recorded, drafter, prompts, answers, depth, batch_size=batch_size)
    growth = grow(ranks, num_nodes)
    return growth.tree(len(growth.tau))


def _recorded(store: StateStore, sample: Sample, num_tokens: int) -> RecordedText | None:
    """The beginning of a greedy answer with the target's states; None if it is none, or too short."""
    begin = sample.prompt_length
    end = begin + num_tokens
    batch = {name: tensor.cpu() for name, tensor in store.collate([sample]).items()}
    answer = sample.tokens[begin:end]
    if begin == 0 or len(answer) < num_tokens or not torch.equal(batch["best"][0, begin:end], answer):
        return None
    dtype = store.target.dtype
    taps = tuple(states[0, : end - 1].to(dtype) for states in batch.get("taps", ()))
    return RecordedText(sample.tokens[:begin], answer, batch["hidden"][0, : end - 1].to(dtype), taps)

"""tau while a drafter trains: a few held-out prompts are continued greedily with the drafter as it is.

A prompt is what stands before the first token to learn, a chat's header and question included. Prompts longer than the
limit are passed over while there are shorter ones; where there are not enough, the beginning of a longer one stands in,
as a text without its beginning would be of another kind than any that the drafter will see. Of texts without a prompt
it is the first half, up to the limit.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.common.checks import check_at_least
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.training.data import Sample
from specdec.training.objectives.base import Objective

__all__ = ["TauProbe", "probe_prompts", "probe_stats"]


@dataclass(frozen=True, slots=True)
class TauProbe:
    """What an evaluation decodes to measure tau.

    Attributes:
        num_prompts: held-out prompts, decoded as one batch; 0 leaves the measurement out.
        prompt_tokens: most tokens of a prompt.
        new_tokens: tokens that are decoded after each.
    """

    num_prompts: int = 8
    prompt_tokens: int = 256
    new_tokens: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, {"num_prompts": self.num_prompts})
        check_at_least(1, {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens})


def probe_prompts(held_out: Sequence[Sample], max_positions: int, probe: TauProbe) -> list[torch.Tensor]:
    """The prompts of a probe, each [n] int64.

    Args:
        held_out: where they are taken from, in this order.
        max_positions: the target's context, which prompt and new tokens fit into.
        probe: how many, and how long.

    Raises:
        ValueError: the context has no room for a prompt and the new tokens.
    """
    if probe.num_prompts == 0:
        return []
    longest = min(probe.prompt_tokens, max_positions - probe.new_tokens)
    if longest < 1:
        raise ValueError(
            f"new_tokens: expected fewer than {max_positions}, the target's context, got {probe.new_tokens}"
        )
    prompts = []
    for sample in held_out:
        given = sample.prompt_length
        prompts.append(sample.tokens[: given if given >= 2 else max(1, min(sample.tokens.shape[0] // 2, longest))])
    whole = [prompt for prompt in prompts if prompt.shape[0] <= longest]
    return [*whole, *(prompt[:longest] for prompt in prompts if prompt.shape[0] > longest)][: probe.num_prompts]


def probe_stats(
    objective: Objective, target: Target, prompts: Sequence[torch.Tensor], new_tokens: int, tree: Any
) -> Any:
    """Acceptance statistics of the network as it is, on a copy: decoding casts it to the target's dtype.

    Args:
        objective: holds the network in training; unchanged.
        target: the frozen target.
        prompts: decoded as one batch.
        new_tokens: decoded after each.
        tree: what the drafter proposes; None for its kind's own.
    """
    network = objective.network
    try:
        objective.network = copy.deepcopy(network)
        drafter = objective.drafter(tree)
    finally:
        objective.network = network
    with torch.autocast(target.device.type, enabled=False):
        return Decoder(target, drafter).decode(list(prompts), new_tokens, stop_tokens=target.stop_tokens).stats

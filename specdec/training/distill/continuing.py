"""What a target writes behind prompts, as one closed batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specdec.drafting.base import Drafter
from specdec.generation.generate import generate
from specdec.models.target.target import Target

__all__ = ["continue_prompts"]


def continue_prompts(
    target: Target,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int,
    *,
    drafter: Drafter | None = None,
    temperature: float = 0.0,
    seeds: Sequence[int],
    ends: Iterable[int] | None = None,
    **generation: Any,
) -> list[list[int]]:
    """What the target writes after each prompt, its end token included.

    Args:
        target: the target.
        prompts: token ids.
        max_new_tokens: most tokens of each continuation.
        drafter: as for `specdec.generate`.
        temperature: 0 for greedy.
        seeds: one per prompt.
        ends: tokens that end a continuation; those of the target's own configuration by default.
        generation: further settings, as for `specdec.generate`.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    stops = frozenset(target.stop_tokens if ends is None else ends)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    output: Any = generate(
        target,
        drafter,
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        seed=list(seeds),
        return_dict_in_generate=True,
        **{"do_sample": False, **sampling, **generation},
    )
    continuations = []
    for row in output.sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        continuations.append(row if "min_new_tokens" in generation else row[: end + 1])
    return continuations

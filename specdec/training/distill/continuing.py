"""What a target writes behind prompts, as one closed batch."""

from collections.abc import Sequence
from typing import Any

import torch

from specdec.generation.generate import generate
from specdec.jobs.running import sampling
from specdec.models.target.target import Target

__all__ = ["continue_prompts"]


def continue_prompts(
    target: Target,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int],
    **generation: Any,
) -> list[list[int]]:
    """What the target writes after each prompt by itself, its end token included.

    Args:
        target: the target.
        prompts: token ids.
        max_new_tokens: most tokens of each continuation.
        temperature: 0 for greedy.
        seeds: one per prompt.
        generation: further settings, as for `specdec.generate`.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    stops = frozenset(target.stop_tokens)
    output: Any = generate(
        target,
        None,
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        seed=list(seeds),
        return_dict_in_generate=True,
        **sampling(temperature),
        **generation,
    )
    continuations = []
    for row in output.sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        continuations.append(row if "min_new_tokens" in generation else row[: end + 1])
    return continuations

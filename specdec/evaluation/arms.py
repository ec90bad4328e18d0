"""The ways to decode that an evaluation compares: ours, plain and with drafters, and transformers' own.

Every arm is called as its users call it (`specdec.generate`, `model.generate`) and takes what they take: the time of a
call is all of it, arguments and prompt included. New tokens are counted in one way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.drafters.draft_model import DraftModel
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafting.base import Drafter
from specdec.evaluation.records import PLAIN, ArmInfo
from specdec.generation.generate import SpecDecodeOutput, generate
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target

__all__ = ["Arm", "Decoded", "Request", "our_arm", "our_arms", "transformers_arm", "transformers_arms"]

LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes, as its documentation advises."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a batch of prompts is decoded with.

    Attributes:
        max_new_tokens: most new tokens of each row.
        temperature: 0 for greedy decoding; otherwise of the whole law, without top-k and top-p.
        seeds: of sampling, one per row.
    """

    max_new_tokens: int
    temperature: float
    seeds: tuple[int, ...]

    @property
    def sampling(self) -> dict[str, Any]:
        """As fields of a `GenerationConfig`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class Decoded:
    """What an arm gave: the new tokens of every row, and statistics from arms that have some."""

    tokens: list[list[int]]
    stats: AcceptanceStats | None


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode.

    Attributes:
        info: its name and what it is.
        run: decodes a batch of 1-D prompts.
        drafter: of ours, what proposes.
    """

    info: ArmInfo
    run: Callable[[Sequence[torch.Tensor], Request], Decoded]
    drafter: Drafter | None = None


def our_arms(target: Target, drafters: Mapping[str, Drafter]) -> list[Arm]:
    """Plain decoding and every drafter, through `specdec.generate`."""
    return [our_arm(target, name, drafter) for name, drafter in {PLAIN: NoDrafter(), **drafters}.items()]


def transformers_arms(target: Target, drafters: Mapping[str, Drafter], *, batch_size: int) -> list[Arm]:
    """`model.generate`, and its assisted generation where one of our drafters has a counterpart there.

    Args:
        target: the target.
        drafters: ours; a prompt lookup and a draft model have counterparts.
        batch_size: rows of the batches to come. transformers assists one row at a time: larger ones have `generate`
            alone.
    """
    arms = [transformers_arm(target, "transformers", "generate", {})]
    if batch_size > 1:
        return arms
    if any(isinstance(drafter, PromptLookup) for drafter in drafters.values()):
        about = f"generate with prompt_lookup_num_tokens={LOOKUP_TOKENS}"
        options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        arms.append(transformers_arm(target, "transformers_prompt_lookup", about, options))
    for name, drafter in drafters.items():
        if isinstance(drafter, DraftModel):
            about = f"generate with {name} as assistant_model"
            arms.append(transformers_arm(target, f"transformers_{name}", about, {"assistant_model": drafter.model}))
    return arms


def our_arm(target: Target, name: str, drafter: Drafter) -> Arm:
    """Ours with one drafter, through `specdec.generate`."""

    def run(prompts: Sequence[torch.Tensor], request: Request) -> Decoded:
        ids, mask = _padded(target, prompts)
        output = generate(
            target,
            drafter,
            ids,
            attention_mask=mask,
            max_new_tokens=request.max_new_tokens,
            seed=list(request.seeds),
            return_dict_in_generate=True,
            use_cache=False,  # nobody reads the keys and values, which would be copied
            **request.sampling,
        )
        assert isinstance(output, SpecDecodeOutput)
        assert output.stats is not None
        rows = output.sequences[:, ids.shape[1] :].tolist()
        lengths = [1 + sum(row) for row in output.stats.num_emitted]  # the first token is the prompt's
        return Decoded([row[:length] for row, length in zip(rows, lengths, strict=True)], output.stats)

    return Arm(ArmInfo(name, "specdec", _about(drafter)), run, drafter)


def transformers_arm(target: Target, name: str, about: str, options: dict[str, Any]) -> Arm:
    """Transformers' own `generate`.

    Args:
        target: the target.
        name: of the arm.
        about: what it is, in words.
        options: further arguments of `generate`, such as those of its assisted or compiled forms.
    """
    stops = target.stop_tokens

    def run(prompts: Sequence[torch.Tensor], request: Request) -> Decoded:
        ids, mask = _padded(target, prompts)
        torch.manual_seed(request.seeds[0])
        output = target.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=request.max_new_tokens,
            pad_token_id=stops[0] if stops else 0,
            **request.sampling,
            **options,
        )
        return Decoded([_until_stop(row, stops) for row in output[:, ids.shape[1] :].tolist()], None)

    return Arm(ArmInfo(name, "transformers", about), run)


def _about(drafter: Drafter) -> str:
    """A drafter in words."""
    if isinstance(drafter, NoDrafter):
        return "plain decoding"
    network = getattr(drafter, "model", None) or getattr(drafter, "network", None)
    size = sum(p.numel() for p in network.parameters()) if isinstance(network, torch.nn.Module) else 0
    weights = f", {size / 1e6:.1f} M parameters" if size else ""
    return f"{drafter.kind}, tree of {drafter.shape.num_nodes} nodes{weights}"


def _padded(target: Target, prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] ids and mask, padded on the left as transformers wants it."""
    width = max(prompt.shape[0] for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[0] :] = prompt
        mask[row, width - prompt.shape[0] :] = 1
    return ids.to(target.device), mask.to(target.device)


def _until_stop(row: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """The row up to its first stop token, which belongs to it."""
    ends = [index for index, token in enumerate(row) if token in stop_tokens]
    return row[: ends[0] + 1] if ends else row

"""`specdec.check`: does speculative decoding give what plain decoding gives, on this model and these prompts?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec.drafting.base import Drafter
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.trees.shape import TreeLike
from specdec.tuning.auto import load_drafter

__all__ = ["CheckReport", "Divergence", "check", "first_divergence"]

_ROUNDINGS = 4


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two decodings of one prompt differ.

    Attributes:
        prompt: index of the prompt.
        position: index of the new token, from 0.
        plain: the token of plain decoding.
        speculative: the token of speculative decoding; -1 for the one of both that ended earlier.
        margin: logit of the plain token less that of the speculative one, in a plain pass over the common text. Near 0
            it is a tie that rounding decides; a large margin is a bug.
        tolerance: margin up to which rounding may decide: four roundings of the largest logit in half precision, whose
            passes of different shapes round differently; 0 in float32 and float64, where texts are to be the same.
    """

    prompt: int
    position: int
    plain: int
    speculative: int
    margin: float
    tolerance: float

    @property
    def is_error(self) -> bool:
        """Whether rounding does not explain it."""
        return abs(self.margin) > self.tolerance or self.tolerance == 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Outcome of `check`.

    Attributes:
        num_prompts: prompts that were compared.
        num_tokens: tokens of plain decoding that were compared.
        divergences: the first difference of every prompt that has one.
        tau: acceptance length over all prompts.
    """

    num_prompts: int
    num_tokens: int
    divergences: list[Divergence]
    tau: float

    @property
    def identical(self) -> bool:
        """Whether every prompt gave the same tokens."""
        return not self.divergences

    def __str__(self) -> str:
        head = f"{self.num_prompts} prompts, {self.num_tokens} tokens, tau {self.tau:.2f}: "
        if self.identical:
            return head + "identical to plain decoding"
        return (
            head
            + f"{len(self.divergences)} diverge\n"
            + "\n".join(
                f"  prompt {d.prompt}, new token {d.position}: plain {d.plain}, speculative {d.speculative}, "
                f"logit margin {d.margin:.3g}"
                for d in self.divergences
            )
        )


def check(
    model: PreTrainedModel | Target,
    drafter: Drafter | PreTrainedModel | str | None,
    prompts: Sequence[torch.Tensor],
    *,
    tree: TreeLike | None = None,
    max_new_tokens: int = 64,
) -> CheckReport:
    """Compare greedy speculative decoding with plain decoding in the same runtime, prompt by prompt.

    Args:
        model: the target.
        drafter: as in `specdec.generate`.
        prompts: 1-D int64 tensors of token ids.
        tree: as in `specdec.generate`.
        max_new_tokens: tokens to compare per prompt.
    """
    target = model if isinstance(model, Target) else Target(model)
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    speculative = Decoder(target, load_drafter(drafter, target, tree=tree))
    plain = Decoder(target)
    divergences, emitted, num_tokens = [], [], 0
    for index, prompt in enumerate(prompts):
        expected = plain.decode([prompt], max_new_tokens).tokens[0]
        result = speculative.decode([prompt], max_new_tokens)
        num_tokens += len(expected)
        emitted += result.stats.num_emitted[0]
        divergence = first_divergence(target, prompt, expected, result.tokens[0], index=index)
        if divergence is not None:
            divergences.append(divergence)
    tau = sum(emitted) / len(emitted) if emitted else float("nan")
    return CheckReport(len(prompts), num_tokens, divergences, tau)


def first_divergence(
    target: Target, prompt: torch.Tensor, expected: list[int], got: list[int], *, index: int = 0
) -> Divergence | None:
    """The first place where a text differs from that of plain decoding; None if it does not.

    Args:
        target: the target.
        prompt: 1-D int64 tokens before both texts.
        expected: what plain decoding gave.
        got: what is compared with it.
        index: number of the prompt, for the report.
    """
    length = max(len(expected), len(got))
    plain, other = (tokens + [-1] * (length - len(tokens)) for tokens in (expected, got))
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b), None)
    if position is None:
        return None
    margin, tolerance = _margin(target, prompt, plain, other[position], position)
    return Divergence(index, position, plain[position], other[position], margin, tolerance)


@torch.no_grad()
def _margin(target: Target, prompt: torch.Tensor, expected: list[int], got: int, position: int) -> tuple[float, float]:
    """Logit of the expected token less that of the one that came, over the text before it; and what rounding may do."""
    text = torch.cat(
        (prompt.to(target.device), torch.tensor(expected[:position], dtype=torch.int64, device=target.device))
    )
    lengths = torch.tensor([text.shape[0]], dtype=torch.int32, device=target.device)
    with target.hooked():
        logits = target.prefill(text[None], lengths, target.new_cache(1, text.shape[0])).logits[0].float()
    is_half = target.dtype in (torch.bfloat16, torch.float16)
    tolerance = _ROUNDINGS * torch.finfo(target.dtype).eps * float(logits.abs().amax()) if is_half else 0.0
    if min(got, expected[position]) < 0:
        return float("inf"), tolerance
    return float(logits[expected[position]] - logits[got]), tolerance

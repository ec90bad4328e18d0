"""An answer step by step: what was proposed, what the target thought of it, what was kept."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from specdec.common.text_pieces import pieces_of
from specdec.drafting.base import Drafter
from specdec.evaluation.arms import Request
from specdec.evaluation.records import TracedStep
from specdec.generation.settings import merge_settings
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import choose_rule
from specdec.loop.step import StepOutput, StepReport
from specdec.models.target.target import Target

__all__ = ["trace"]


def trace(
    target: Target, drafter: Drafter, prompt: torch.Tensor, request: Request, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], str, list[TracedStep]]:
    """Decode one prompt in the eager loop, with the law of every node.

    Args:
        target: the target.
        drafter: what proposes.
        prompt: 1-D int64.
        request: for one row.
        tokenizer: the target's.

    Returns:
        The new tokens, the text of the first one, and the steps behind it.
    """
    do_sample = request.temperature > 0
    config = merge_settings(target, None, request.sampling)
    processing = Processing(
        config,
        do_sample=do_sample,
        prompt_lengths=[prompt.shape[0]],
        max_new_tokens=request.max_new_tokens,
        width=prompt.shape[0],
        stop_tokens=target.stop_tokens,
        device=target.device,
        backend=target.backend,
    )
    reader = _Reader(tokenizer, prompt.tolist())
    decoder = Decoder(target, drafter, acceptance=choose_rule("auto", drafter, do_sample=do_sample), capture=False)
    result = decoder.decode(
        [prompt],
        request.max_new_tokens,
        stop_tokens=target.stop_tokens,
        seed=list(request.seeds),
        processing=processing,
        on_step=reader.read,
    )
    return result.tokens[0], reader.first, reader.steps


class _Reader:
    """Takes steps as the loop goes, and keeps what they look like.

    Attributes:
        first: text of the first token.
        steps: what was read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._text = list(prompt)
        self.first = ""
        self.steps: list[TracedStep] = []

    def read(self, report: StepReport) -> None:
        """Keep a step; the first report is the prompt's."""
        (new,) = report.new
        assert report.output is not None
        if report.output.tree is None:
            self.first = "".join(pieces_of(self._tokenizer, self._text, new))
        elif new:
            self.steps.append(self._step(report.output, new))
        self._text += new

    def _step(self, output: StepOutput, new: Sequence[int]) -> TracedStep:
        assert output.tree is not None
        tokens, parent = output.tree.tokens[0].tolist(), output.tree.parent[0].tolist()
        used = [node for node in range(len(tokens)) if node == 0 or parent[node] >= 0]
        place = {node: index for index, node in enumerate(used)}
        laws = output.processed.logits[0].float().softmax(-1)  # [N, V]
        best_probs, best = laws.max(-1)
        above = [parent[node] for node in used[1:]]
        probs = laws[above, [tokens[node] for node in used[1:]]].tolist()
        texts = {-1: self._text[:-1]}  # by node, the text up to it
        for node in used:
            texts[node] = [*texts[parent[node]], tokens[node]]
        return TracedStep(
            parent=[-1, *(place[node] for node in above)],
            pieces=[self._piece(texts[parent[node]], tokens[node]) for node in used],
            probs=[1.0, *(_rounded(value) for value in probs)],
            choices=[self._piece(texts[node], int(best[node])) for node in used],
            choice_probs=[_rounded(float(best_probs[node])) for node in used],
            path=[place[node] for node in output.path[0].tolist() if node >= 0][: len(new)],
            emitted=pieces_of(self._tokenizer, self._text, new),
        )

    def _piece(self, text: Sequence[int], token: int) -> str:
        """What a token adds to a text."""
        return pieces_of(self._tokenizer, text[-8:], [token])[0]


def _rounded(value: float) -> float:
    """A probability to four digits."""
    return float(f"{value:.4g}")

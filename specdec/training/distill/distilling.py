"""`specdec distill`: prompts to a file of texts that the target wrote, by one process or many, and after interruptions.

Every text has a random seed of its own, and which prompts are answered together is settled before the first one is: so
an interrupted run goes on where it stopped, several processes write what one would, and the file is the same.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.drafters.load import load_drafter
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target
from specdec.training.distill.parts import Parts, processes
from specdec.training.distill.plan import Plan
from specdec.training.distill.progress import WritingProgress
from specdec.training.distill.prompts import Prompt, Turns, read_prompts
from specdec.training.distill.self_prompts import SelfPrompts, UserTurn, draw_prompts
from specdec.training.distill.writing import Writer

__all__ = ["distill"]

logger = logging.getLogger(__name__)


def distill(
    target: PreTrainedModel | Target,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | None,
    output: str | Path,
    *,
    self_prompts: SelfPrompts | None = None,
    turns: Turns = "all",
    max_new_tokens: int = 512,
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 16,
    drafter: Drafter | PreTrainedModel | str | None = None,
    chat_template: str | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Let the target answer prompts, and write what `specdec train` reads.

    Lines have the exact `tokens` and say which of them the target wrote: those from `prompt_length` on, beside `prompt`
    and `completion`; or the `spans` of a conversation of several answers, beside its `messages`. They are in the order
    of the prompts. Under torchrun the batches are divided over the processes, each of which holds the whole target.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        data: JSON lines: `{"prompt"}`, `{"text"}`, or conversations; None for `self_prompts` alone.
        output: JSON lines. What is there already is not written again; nothing else changes before the end, when all
            parts (see `parts.py`) become one file.
        self_prompts: prompts that the target makes up, behind those of the data.
        turns: `"all"`: the target writes every answer of a conversation, each after its own earlier ones; `"last"`:
            only the last one, after those that were given.
        max_new_tokens: most tokens of an answer; fewer where the target ends it, or where its context does.
        temperatures: texts take them in turn; 0 is greedy.
        batch_size: texts written at a time.
        drafter: speeds the writing up; it does not change the texts' law. As for `specdec.generate`.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        seed: of sampling.

    Returns:
        `written`, `present` (lines that were there) and `skipped` (prompts too long for the target's context, or that
        the chat template refuses), over all processes.

    Raises:
        FileNotFoundError: no such data.
        ValueError: bad arguments, malformed data, or an `output` that belongs to other prompts or settings.
        NotImplementedError: several processes that share one target.
    """
    target = target if isinstance(target, Target) else Target(target)
    if target.sharding is not None:
        raise NotImplementedError("target: expected a whole one in every process, got one that is sharded over them")
    if data is None and self_prompts is None:
        raise ValueError("data: expected a file, self_prompts or both, got neither")
    user_turn = None if self_prompts is None else UserTurn.of(tokenizer, chat_template)
    prompts, num_refused = _read(target, tokenizer, data, turns, chat_template)
    if self_prompts is not None and user_turn is not None:
        first = len(prompts) + num_refused
        prompts += [Prompt(first + i, user_turn.head, is_self_made=True) for i in range(self_prompts.count)]
    usable = [prompt for prompt in prompts if len(prompt.tokens) < target.max_positions]
    plan = Plan(usable, max_new_tokens, temperatures, batch_size, seed, self_prompts)
    output = Path(output)
    with processes() as crew:
        parts = Parts(output, crew.rank)
        present = parts.read()
        plan.check(present)
        crew.wait()  # until all have read: what others append from here on is not present for anybody
        writer = Writer(target, tokenizer, chat_template, load_drafter(drafter, target), max_new_tokens, seed)
        batches = [
            [one for one in batch if one.index not in present] for batch in plan.batches()[crew.rank :: crew.count]
        ]
        with parts.appending() as append, WritingProgress(sum(map(len, batches)), crew.rank, crew.count) as progress:
            for batch in filter(None, batches):
                asked = batch
                if self_prompts is not None and user_turn is not None:
                    asked = draw_prompts(writer, batch, user_turn, self_prompts)
                texts = writer.answer(asked, plan.temperature(batch[0]))
                append(plan.line(prompt, text.record()) for prompt, text in zip(batch, texts, strict=True))
                progress.advance([text.num_written for text in texts])
        crew.wait()
        if crew.rank == 0:
            parts.merge()
        crew.wait()
    counts = {
        "written": len(usable) - len(present),
        "present": len(present),
        "skipped": len(prompts) - len(usable) + num_refused,
    }
    logger.info("distill: %s", counts)
    return counts


def _read(
    target: Target, tokenizer: PreTrainedTokenizerBase, data: str | Path | None, turns: Turns, chat_template: str | None
) -> tuple[list[Prompt], int]:
    """The prompts of the data, and how many were refused; none without data."""
    if turns not in ("all", "last"):
        raise ValueError(f"turns: expected 'all' or 'last', got {turns!r}")
    if data is None:
        return [], 0
    return read_prompts(Path(data), tokenizer, vocab_size=target.vocab_size, chat_template=chat_template, turns=turns)

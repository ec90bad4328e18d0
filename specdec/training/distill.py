"""`specdec distill`: the target itself writes the texts that drafters learn from.

A drafter has to guess the target, not the data, so the target continues prompts, and drafters learn its continuations.
Every text has a random seed of its own: an interrupted run goes on where it stopped and gives the same file.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.common.checks import check_at_least
from specdec.drafters.load import load_drafter
from specdec.drafting.base import Drafter
from specdec.generation.generate import generate
from specdec.models.target.target import Target
from specdec.training.data import read_prompts

__all__ = ["continue_prompts", "distill"]

logger = logging.getLogger(__name__)


def distill(
    target: PreTrainedModel | Target,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path,
    output: str | Path,
    *,
    max_new_tokens: int = 512,
    temperatures: Sequence[float] = (0.0,),
    batch_size: int = 16,
    drafter: Drafter | PreTrainedModel | str | None = None,
    chat_template: str | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Let the target continue prompts, and write what `specdec train` reads.

    Each line of `output` has `prompt`, `completion`, and the exact `tokens` with `prompt_length`. Lines that are there
    already are not written again.

    Args:
        target: the target.
        tokenizer: its tokenizer.
        data: JSON lines: `{"prompt"}`, `{"text"}`, or conversations, of which the part before the last answer is the
            prompt.
        output: JSON lines; appended to.
        max_new_tokens: most tokens of a completion; fewer where the target ends it, or where its context does.
        temperatures: batches of texts take them in turn; 0 is greedy.
        batch_size: texts written at a time.
        drafter: speeds the writing up; it does not change the texts' law. As for `specdec.generate`.
        chat_template: Jinja template for conversations; the tokenizer's own by default.
        seed: of sampling.

    Returns:
        `written`, `present` (lines that were there) and `skipped` (prompts too long for the target's context).

    Raises:
        FileNotFoundError: no such data.
        ValueError: bad arguments, malformed data, or an `output` that belongs to other prompts or settings.
    """
    target = target if isinstance(target, Target) else Target(target)
    check_at_least(1, {"max_new_tokens": max_new_tokens, "batch_size": batch_size})
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures: expected one or more of at least 0, got {list(temperatures)}")
    output = Path(output)
    prompts = read_prompts(Path(data), tokenizer, vocab_size=target.vocab_size, chat_template=chat_template)
    room = target.max_positions - 1
    usable = [(index, prompt) for index, prompt in enumerate(prompts) if prompt.shape[0] <= room]

    def settings(index: int) -> dict[str, Any]:
        """What decides a text beside its prompt."""
        temperature = _temperature(index, temperatures, batch_size)
        sampling = {"temperature": temperature, "seed": seed + index} if temperature else {"temperature": 0.0}
        return {"max_new_tokens": max_new_tokens, **sampling}

    present = _complete_lines(output, usable, settings)
    proposer = load_drafter(drafter, target)

    counts = {"written": 0, "present": present, "skipped": len(prompts) - len(usable)}
    output.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("the target writes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        output.open("a", encoding="utf-8") as file,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("", total=len(usable), completed=present)
        for temperature, batch in _batches(usable[present:], temperatures, batch_size):
            rows = [prompt for _, prompt in batch]
            limit = min(max_new_tokens, target.max_positions - max(map(len, rows)))
            seeds = [seed + index for index, _ in batch]
            completions = continue_prompts(target, rows, limit, drafter=proposer, temperature=temperature, seeds=seeds)
            for (index, prompt), completion in zip(batch, completions, strict=True):
                file.write(_line(index, prompt.tolist(), completion, tokenizer, settings(index)))
            file.flush()
            counts["written"] += len(batch)
            progress.advance(task, len(batch))
    logger.info("distill: %s", counts)
    return counts


def continue_prompts(
    target: Target,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    *,
    drafter: Drafter | None = None,
    temperature: float = 0.0,
    seeds: Sequence[int],
    **generation: Any,
) -> list[list[int]]:
    """What the target writes after each prompt, its end-of-text token included.

    Args:
        target: the target.
        prompts: 1-D int64 tensors.
        max_new_tokens: most tokens of each continuation.
        drafter: as for `specdec.generate`.
        temperature: 0 for greedy.
        seeds: one per prompt.
        generation: further settings, as for `specdec.generate`.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    output: Any = generate(
        target,
        drafter,
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        seed=list(seeds),
        return_dict_in_generate=True,
        **{"do_sample": False, **sampling, **generation},
    )
    ends = target.model.generation_config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    continuations = []
    for row in output.sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row) - 1)
        continuations.append(row if "min_new_tokens" in generation else row[: end + 1])
    return continuations


def _batches(
    rows: Sequence[tuple[int, torch.Tensor]], temperatures: Sequence[float], batch_size: int
) -> list[tuple[float, list[tuple[int, torch.Tensor]]]]:
    """Rows in order, cut where a batch is full or the temperature changes."""
    batches: list[tuple[float, list[tuple[int, torch.Tensor]]]] = []
    for index, prompt in rows:
        # whole batches of one temperature, so that cutting there costs nothing
        temperature = _temperature(index, temperatures, batch_size)
        if not batches or batches[-1][0] != temperature or len(batches[-1][1]) == batch_size:
            batches.append((temperature, []))
        batches[-1][1].append((index, prompt))
    return batches


def _temperature(index: int, temperatures: Sequence[float], batch_size: int) -> float:
    return float(temperatures[index // batch_size % len(temperatures)])


def _line(
    index: int, prompt: list[int], completion: list[int], tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> str:
    record = {
        "index": index,
        "prompt": tokenizer.decode(prompt),
        "completion": tokenizer.decode(completion, skip_special_tokens=True),
        "tokens": prompt + completion,
        "prompt_length": len(prompt),
        "settings": settings,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def _complete_lines(
    output: Path, usable: Sequence[tuple[int, torch.Tensor]], settings: Callable[[int], dict[str, Any]]
) -> int:
    """How many of the prompts have their line in `output`; what a crash left of a line is cut off."""
    if not output.exists():
        return 0
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(output, whole)
    lines = content[:whole].splitlines()
    for line, (index, prompt) in zip(lines, usable, strict=False):
        try:
            record = json.loads(line)
            same = record["index"] == index and record["tokens"][: record["prompt_length"]] == prompt.tolist()
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise ValueError(f"output: expected a new file or one of the same prompts, got {output} with others")
        if record.get("settings") != settings(index):
            raise ValueError(
                f"output: expected a new file or one written with {settings(index)}, got {output}, "
                f"in which text {index} has {record.get('settings')}"
            )
    if len(lines) > len(usable):
        raise ValueError(f"output: expected at most {len(usable)} lines in {output}, one per prompt, got {len(lines)}")
    return len(lines)

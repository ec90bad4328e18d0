"""Many requests on one model: closed batches beside transformers, and rows that are refilled beside closed batches.

    python -m specdec.bench.batches closed --model smollm2 --dtype bfloat16 --rows 16 64
    python -m specdec.bench.batches refilled --model tiny --num-prompts 200 --rows 16

`closed`: plain decoding of whole batches, by `specdec.generate` and by transformers' `generate` (sdpa attention), in
turns, no text ending before the others. `refilled`: prompts of mixed lengths with answers of mixed lengths, through an
`Engine` and in closed batches of as many rows, in turns, plainly in both arms. Tokens per second, the median of the
repeats and of their ratios; texts are compared.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.bundled.load import load_model
from specdec.common.provenance import append_record, provenance
from specdec.engine.engine import Engine
from specdec.generation.generate import generate

__all__ = ["closed", "main", "refilled"]

Rows = list[list[int]]
Arm = Callable[[], Rows]


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status, 1 where texts differ that should not."""
    parser = argparse.ArgumentParser(prog="specdec.bench.batches", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("closed", "refilled"))
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[16], help="of a batch (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(16, 128), help="fewest and most (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of the longest answer (%(default)s)")
    parser.add_argument("--num-prompts", type=int, default=200, help="of `refilled` (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each arm (%(default)s)")
    parser.add_argument("--output", type=Path, help="file of records, which a line is added to")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model, dtype=getattr(torch, options.dtype))
    vocab_size = min(model.config.vocab_size, len(tokenizer))
    is_same = True
    for num_rows in options.rows:
        count = options.num_prompts if options.what == "refilled" else num_rows
        prompts = _prompts(count, options.prompt_tokens, vocab_size)
        sizes = {"max_new_tokens": options.max_new_tokens, "repeats": options.repeats}
        if options.what == "refilled":
            found = refilled(model, prompts, num_rows=num_rows, **sizes)
        else:
            found = closed(model, prompts, **sizes)
        settings = {"model": options.model, "dtype": options.dtype, "num_prompts": count, "num_rows": num_rows}
        settings |= {"prompt_tokens": list(options.prompt_tokens), **sizes}
        record = {"bench": f"batches {options.what}", **settings, **found, "provenance": provenance()}
        print(json.dumps(record))
        is_same = is_same and (found["share_of_equal_texts"] == 1.0 or options.dtype != "float32")
        if options.output is not None:
            append_record(options.output, record)
    return 0 if is_same else 1


def closed(model: PreTrainedModel, prompts: Rows, *, max_new_tokens: int, repeats: int) -> dict[str, Any]:
    """A closed batch by this library and by transformers.

    Args:
        model: the target.
        prompts: one for every row.
        max_new_tokens: tokens of every answer.
        repeats: of each arm, in turns.
    """
    ids, mask = _padded(prompts)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    settings |= {"pad_token_id": 0, "attention_mask": mask}

    def ours() -> Rows:
        return _new(generate(model, None, ids, **settings), ids)

    def theirs() -> Rows:
        with torch.inference_mode():
            return _new(model.generate(ids, **settings), ids)

    return _in_turns({"specdec": ours, "transformers": theirs}, repeats)


def refilled(
    model: PreTrainedModel, prompts: Rows, *, num_rows: int, max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """The same requests through an engine, and in closed batches in the order in which they come.

    Args:
        model: the target.
        prompts: any number.
        num_rows: rows of the engine, and of a batch.
        max_new_tokens: tokens of the longest answer; the others are as evenly spread from an eighth of it on.
        repeats: of each arm, in turns.
    """
    generator = torch.Generator().manual_seed(1)
    limits = torch.randint(max_new_tokens // 8, max_new_tokens + 1, (len(prompts),), generator=generator).tolist()

    def engine() -> Rows:
        longest = max(map(len, prompts)) + max_new_tokens
        with Engine(model, None, max_rows=num_rows, max_length=longest, stop_tokens=()) as rows:
            asked = zip(prompts, limits, strict=True)
            settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
            handles = [rows.submit(one, max_new_tokens=limit, **settings) for one, limit in asked]
            return [handle.result().tokens for handle in handles]

    def batches() -> Rows:
        texts: Rows = []
        for first in range(0, len(prompts), num_rows):
            ids, mask = _padded(prompts[first : first + num_rows])
            own = limits[first : first + num_rows]
            settings = {"max_new_tokens": max(own), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            new = _new(generate(model, None, ids, attention_mask=mask, **settings), ids)
            texts += [text[:limit] for text, limit in zip(new, own, strict=True)]
        return texts

    return _in_turns({"refilled": engine, "closed": batches}, repeats)


def _in_turns(arms: dict[str, Arm], repeats: int) -> dict[str, Any]:
    """Time the arms one after the other, again and again, after a round that does not count.

    Returns:
        Tokens per second of each, the ratio of the first to the second by round, and how many texts are equal.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, Rows] = {}
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            begin = time.perf_counter()
            texts[name] = arm()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    first, second = arms
    num_tokens = sum(map(len, texts[first]))
    ratios = [slow / fast for fast, slow in zip(seconds[first], seconds[second], strict=True)]
    equal = [one == other for one, other in zip(texts[first], texts[second], strict=True)]
    return {
        "num_tokens": num_tokens,
        **{f"{name}_tokens_per_s": round(num_tokens / statistics.median(took), 1) for name, took in seconds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in sorted(ratios)],
        "share_of_equal_texts": sum(equal) / len(equal),
    }


def _prompts(count: int, sizes: Sequence[int], vocab_size: int) -> Rows:
    """Random tokens, of lengths spread evenly."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(sizes[0], sizes[1] + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _padded(prompts: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask, as transformers wants them."""
    width = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), width, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask


def _new(sequences: Any, ids: torch.Tensor) -> Rows:
    """What comes behind the prompts."""
    rows: Rows = sequences[:, ids.shape[1] :].tolist()
    return rows


if __name__ == "__main__":
    sys.exit(main())

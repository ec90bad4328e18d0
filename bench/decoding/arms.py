"""The arms of the decoding benchmark: ours with and without a drafter, and transformers' own `generate`.

An arm decodes one batch of prompts greedily and returns the new tokens. All arms are timed and counted in one way: the
time of a long generation less that of one token, divided by the tokens in between. So the prompt's pass, which is none
of decoding, is in no figure, whatever a library hides in it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.drafting.base import Drafter
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target

__all__ = ["Arm", "ArmTimes", "UnavailableError", "our_arm", "time_arm", "transformers_arm"]

Tokens = list[list[int]]
Prompts = Sequence[torch.Tensor]


class UnavailableError(RuntimeError):
    """An arm cannot run or be timed here; the message says why."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode a batch.

    Attributes:
        name: name in reports.
        run: from prompts and a number of new tokens to the new tokens of every row, and statistics if there are any.
        drafter: what proposes, if anything does.
        run_eagerly: `run` without capturing steps, whose phases cannot be told apart once they are one graph; releases
            what was captured.
    """

    name: str
    run: Callable[[Prompts, int], tuple[Tokens, AcceptanceStats | None]]
    drafter: Drafter | None = None
    run_eagerly: Callable[[Prompts, int], AcceptanceStats] | None = None


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """What timing an arm gave.

    Attributes:
        tokens: per batch of prompts and row, the new tokens.
        stats: per batch, the statistics of the last repeat.
        num_timed: tokens that `decode_s` is for: all but the first of every row.
        decode_s: median seconds of the tokens after the first.
        first_s: median seconds up to the first token.
    """

    tokens: list[Tokens]
    stats: list[AcceptanceStats]
    num_timed: int
    decode_s: float
    first_s: float


def our_arm(name: str, target: Target, drafter: Drafter | None, stop_tokens: Sequence[int] = ()) -> Arm:
    """Decoding with this library; without a drafter the baseline of every speedup."""
    decoder = Decoder(target, drafter)

    def run(prompts: Prompts, max_new_tokens: int) -> tuple[Tokens, AcceptanceStats | None]:
        result = decoder.decode(prompts, max_new_tokens, stop_tokens=stop_tokens)
        return result.tokens, result.stats

    def run_eagerly(prompts: Prompts, max_new_tokens: int) -> AcceptanceStats:
        decoder.release()
        eager = Decoder(target, drafter, capture=False)
        return eager.decode(prompts, max_new_tokens, stop_tokens=stop_tokens).stats

    return Arm(name, run, decoder.drafter, run_eagerly)


def transformers_arm(target: Target, stop_tokens: Sequence[int] = (), *, compiled: bool = False) -> Arm:
    """Greedy `generate` of transformers: eager with a dynamic cache, or compiled with a static one.

    Raises:
        UnavailableError: compiled, where transformers does not compile.
    """
    if compiled and target.device.type != "cuda":
        raise UnavailableError(f"transformers compiles generate on an accelerator only, not on {target.device.type}")

    def run(prompts: Prompts, max_new_tokens: int) -> tuple[Tokens, AcceptanceStats | None]:
        width = max(prompt.shape[0] for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # generate wants its padding on the left
            ids[row, width - prompt.shape[0] :] = prompt
            mask[row, width - prompt.shape[0] :] = 1
        output = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop_tokens) or None,
            pad_token_id=0,
            **({"cache_implementation": "static"} if compiled else {}),
        )
        return [_until_stop(row, stop_tokens) for row in output[:, width:].tolist()], None

    return Arm("transformers_static" if compiled else "transformers", run)


def time_arm(
    arm: Arm,
    batches: Sequence[Prompts],
    max_new_tokens: int,
    *,
    repeats: int,
    device: torch.device,
    tokens: list[Tokens],
) -> ArmTimes:
    """Time an arm that was run before, so that everything is warm.

    Args:
        arm: what to time.
        batches: batches of prompts, decoded one after another.
        max_new_tokens: length of the long generation, at least 2.
        repeats: timed repeats; medians are kept.
        device: where the target is.
        tokens: what the arm gave when it was run before; the count of tokens.

    Raises:
        UnavailableError: more tokens took no more time by the clock.
    """
    stats: list[AcceptanceStats] = []

    def once(length: int) -> float:
        _wait(device)
        begin = time.perf_counter()
        results = [arm.run(prompts, length) for prompts in batches]
        _wait(device)
        seconds = time.perf_counter() - begin
        stats[:] = [found for _, found in results if found is not None]
        return seconds

    once(1)
    pairs = [(once(1), once(max_new_tokens)) for _ in range(repeats)]
    first_s = statistics.median(first for first, _ in pairs)
    decode_s = statistics.median(whole - first for first, whole in pairs)
    if decode_s <= 0:
        raise UnavailableError(f"{max_new_tokens} tokens took no longer than one; longer texts are needed to time it")
    num_timed = sum(len(row) - 1 for batch in tokens for row in batch)
    return ArmTimes(tokens, stats, num_timed, decode_s, first_s)


def _until_stop(row: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """The row up to its first stop token, which belongs to it."""
    ends = [index for index, token in enumerate(row) if token in stop_tokens]
    return row[: ends[0] + 1] if ends else row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Several drafters on the same prompts in one run: identical text, tau, tokens per second, speedup over plain decoding.

The order of work is interleaved (every repeat runs every drafter on every prompt) and a drafter's time is the median
over the repeats, so that a slow moment of the machine hits all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from rich import box
from rich.table import Table

from specdec.drafting.base import Drafter
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target

__all__ = ["ComparisonRow", "compare", "comparison_table"]

_Run: TypeAlias = Callable[[torch.Tensor, int, Sequence[int]], tuple[list[int], AcceptanceStats | None]]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One drafter's results over all prompts.

    Attributes:
        name: what the table calls it.
        num_tokens: new tokens per repeat.
        tau: acceptance length; NaN where it has no meaning (transformers' own generate).
        acceptance_at_depth: as in `AcceptanceStats`.
        tokens_per_second: new tokens by the median time of the repeats.
        speedup: tokens per second over those of the row named "none".
        identical: whether every prompt gave the tokens of plain decoding.
        times_ms: where the time of the last repeat went, by phase.
    """

    name: str
    num_tokens: int
    tau: float
    acceptance_at_depth: list[float]
    tokens_per_second: float
    speedup: float
    identical: bool
    times_ms: dict[str, float]

    def record(self) -> dict[str, Any]:
        """The row for a JSON report; None where there is no tau."""
        return asdict(self) | {"tau": None if self.tau != self.tau else self.tau}


def compare(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    repeats: int = 3,
    on_progress: Callable[[str], None] | None = None,
) -> list[ComparisonRow]:
    """Run every drafter, and transformers' own `generate`, on every prompt, one prompt at a time.

    Args:
        target: the target.
        drafters: by name; one must be named "none" and is the baseline.
        prompts: 1-D int64 tensors.
        max_new_tokens: new tokens per prompt.
        stop_tokens: tokens after which a text ends.
        repeats: timed repeats, after one that warms up.
        on_progress: called with the name of what just finished.
    """
    runs: dict[str, _Run] = {"transformers": partial(_transformers, target)}
    runs |= {name: partial(_ours, Decoder(target, drafter)) for name, drafter in drafters.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, list[list[int]]] = {}
    stats: dict[str, list[AcceptanceStats]] = {}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            _wait(target)
            begin = time.perf_counter()
            results = [run(prompt, max_new_tokens, stop_tokens) for prompt in prompts]
            _wait(target)
            if repeat > 0:
                seconds[name].append(time.perf_counter() - begin)
            texts[name] = [tokens for tokens, _ in results]
            stats[name] = [one for _, one in results if one is not None]
            if on_progress is not None:
                on_progress(name)

    speeds = {name: sum(map(len, texts[name])) / statistics.median(seconds[name]) for name in runs}
    rows = []
    for name in runs:
        merged = AcceptanceStats.merged(stats[name])
        rows.append(
            ComparisonRow(
                name=name,
                num_tokens=sum(map(len, texts[name])),
                tau=merged.tau,
                acceptance_at_depth=merged.acceptance_at_depth,
                tokens_per_second=speeds[name],
                speedup=speeds[name] / speeds["none"],
                identical=texts[name] == texts["none"],
                times_ms=merged.times_ms,
            )
        )
    return rows


def comparison_table(rows: Sequence[ComparisonRow], title: str) -> Table:
    """The rows as a table for a terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)  # fits 80 columns
    table.add_column("drafter", no_wrap=True)
    for heading in ("tokens", "tau", "acceptance by depth", "tok/s", "speedup", "text"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.num_tokens),
            "-" if row.tau != row.tau else f"{row.tau:.2f}",
            " ".join(f"{rate:.2f}" for rate in row.acceptance_at_depth[:5]) or "-",
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}x",
            "identical" if row.identical else "[red]DIFFERS[/red]",
        )
    return table


def _ours(
    decoder: Decoder, prompt: torch.Tensor, max_new_tokens: int, stop_tokens: Sequence[int]
) -> tuple[list[int], AcceptanceStats]:
    result = decoder.decode([prompt], max_new_tokens, stop_tokens=stop_tokens)
    return result.tokens[0], result.stats


def _transformers(
    target: Target, prompt: torch.Tensor, max_new_tokens: int, stop_tokens: Sequence[int]
) -> tuple[list[int], None]:
    prompt = prompt.to(target.device)[None]
    output = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :].tolist(), None


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)

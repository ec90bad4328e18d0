"""How figures, settings and texts are written in reports."""

import math
from collections.abc import Sequence
from typing import Any

from specdec.evaluation.intervals import Interval
from specdec.evaluation.report.document import Cell

__all__ = ["NONE", "around", "at_temperature", "bounds", "count", "interval_cell", "percent", "setting", "times"]

NONE = "\N{EN DASH}"
"""What stands where there is no figure."""


def times(value: float) -> str:
    """A ratio, as 1.62x."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def percent(value: float) -> str:
    """A share; one that is not 0 never reads as 0."""
    return "< 1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def count(number: int, noun: str) -> str:
    """A number of things, as "1 prompt" or "3 prompts"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def bounds(interval: Interval) -> str:
    """Where 95 % of the draws fell; empty where one group tells nothing of others."""
    return "" if math.isnan(interval.low) else f"[{interval.low:.2f}, {interval.high:.2f}]"


def interval_cell(interval: Interval | None, *, is_ratio: bool, is_best: bool = False) -> Cell:
    """A figure with its interval."""
    if interval is None:
        return Cell(NONE)
    text = times(interval.value) if is_ratio else f"{interval.value:.2f}"
    is_certain = interval.low == interval.value == interval.high == 1  # of plain decoding
    return Cell(text, "" if is_certain else bounds(interval), is_best)


def at_temperature(temperature: float) -> str:
    """How one says it: greedy decoding, or a temperature."""
    return "greedy decoding" if temperature == 0 else f"temperature {temperature:g}"


def around(pieces: Sequence[str], position: int) -> str:
    """A text around one of its tokens, which is in brackets."""
    before, after = "".join(pieces[max(0, position - 5) : position]), "".join(pieces[position + 1 : position + 4])
    token = pieces[position] if position < len(pieces) else "end"
    return f"{before}\N{LEFT WHITE SQUARE BRACKET}{token}\N{RIGHT WHITE SQUARE BRACKET}{after}"


def setting(value: Any) -> str:
    """A setting as one would say it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or NONE
    if isinstance(value, dict):
        return ", ".join(f"{name}={setting(one)}" for name, one in value.items()) or NONE
    if isinstance(value, float):
        return f"{value:g}"
    return NONE if value is None else str(value)

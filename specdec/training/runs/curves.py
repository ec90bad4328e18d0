"""Curves of a training run as a picture: losses and the acceptance length by step. A small SVG, no plotting library."""

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["curves_svg", "history_curves"]

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 34
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")

Curve = Sequence[tuple[float, float]]


def history_curves(history: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The panels of a run: `"loss"` with training and held-out curves, and `"tau"`, from the trainer's log entries."""
    wanted = {"loss": {"training": "loss", "held out": "eval_loss"}, "tau": {"held out": "eval_tau"}}
    panels = {
        panel: {
            name: [(float(entry["step"]), float(entry[key])) for entry in history if key in entry]
            for name, key in curves.items()
        }
        for panel, curves in wanted.items()
    }
    return {panel: curves for panel, curves in panels.items() if any(curves.values())}


def curves_svg(panels: Mapping[str, Mapping[str, Curve]], title: str) -> str:
    """Draw panels one below the other, on a common axis of steps.

    Args:
        panels: by their name, curves by their name, each a list of (step, value); values that are not finite are left
            out.
        title: drawn on top.

    Returns:
        An SVG document.
    """
    height = 30 + _HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    steps = [step for curves in panels.values() for curve in curves.values() for step, _ in curve]
    last = max(steps, default=1.0) or 1.0
    for index, (name, curves) in enumerate(panels.items()):
        parts += _panel(name, curves, last, top=30 + index * _HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, curves: Mapping[str, Curve], last: float, top: int) -> list[str]:
    finite = {key: [point for point in curve if math.isfinite(point[1])] for key, curve in curves.items()}
    values = [value for curve in finite.values() for _, value in curve]
    if not values:
        return []
    ticks = _ticks(min(values), max(values))
    low, high = ticks[0], ticks[-1]
    bottom, upper = top + _HEIGHT - _BOTTOM, top + _TOP

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(value: float) -> float:
        return bottom - (bottom - upper) * (value - low) / (high - low)

    parts = [f'<text x="{_LEFT}" y="{upper - 10}">{escape(name)}</text>']
    for tick in ticks:
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(0.0, last):
        if tick <= last:
            parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for index, (key, curve) in enumerate(finite.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="2.5" fill="{colour}"/>' for s, v in curve[-1:]]
        parts.append(f'<text x="{_LEFT + 90 + 110 * index}" y="{upper - 10}" fill="{colour}">{escape(key)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span [low, high]."""
    span = max(high - low, 1e-6 * max(abs(high), 1.0))
    raw = span / 4
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw)
    first, final = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, max(final, first + 1) + 1)]

"""Where the time of a few steps goes, as a picture: one lane per drafter, one bar per phase. A small SVG.

Spans of time come from the decoding loop itself: CUDA events on a GPU, the clock elsewhere. No profiler, so nothing is
slowed down by being watched.
"""

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["lanes_svg", "middle_steps"]

Span = tuple[str, float, float]

_COLOURS = {"draft": "#ff7f0e", "score": "#1f77b4", "verify": "#2ca02c", "commit": "#9467bd"}
_OTHER = "#7f7f7f"
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE = 900, 150, 20, 64, 30


def middle_steps(spans_ms: Sequence[Span], num_steps: int = 4) -> list[Span]:
    """The spans of a few steps from the middle of a generation, moved so that the first begins at 0.

    Args:
        spans_ms: as in `AcceptanceStats.spans_ms`; a step begins with a phase of the name of the first one after
            prefill.
        num_steps: steps to keep; all if there are fewer.
    """
    spans = [span for span in spans_ms if span[0] != "prefill"]
    if not spans:
        return []
    starts = [index for index, span in enumerate(spans) if span[0] == spans[0][0]]
    first = max(0, (len(starts) - num_steps) // 2)
    end = starts[first + num_steps] if first + num_steps < len(starts) else len(spans)
    kept = spans[starts[first] : end]
    origin = kept[0][1]
    return [(name, begin - origin, finish - origin) for name, begin, finish in kept]


def lanes_svg(lanes: Mapping[str, Sequence[Span]], title: str, *, unit: str = "ms") -> str:
    """Draw spans, all lanes on one axis.

    Args:
        lanes: by name, spans that begin at 0, as `middle_steps` gives them.
        title: drawn on top.
        unit: of the axis.

    Returns:
        An SVG document.
    """
    height = _TOP + _LANE * len(lanes) + 40
    last = max((end for spans in lanes.values() for _, _, end in spans), default=0.0) or 1.0

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / last

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>',
    ]
    names = list(dict.fromkeys(name for spans in lanes.values() for name, _, _ in spans))
    for index, name in enumerate(names):
        place = _LEFT + 90 * index
        parts.append(f'<rect x="{place}" y="36" width="12" height="12" fill="{_COLOURS.get(name, _OTHER)}"/>')
        parts.append(f'<text x="{place + 17}" y="46">{escape(name)}</text>')
    for index, (lane, spans) in enumerate(lanes.items()):
        top = _TOP + _LANE * index
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(lane)}</text>')
        for name, begin, end in spans:
            width = max(x(end) - x(begin), 0.2)
            parts.append(
                f'<rect x="{x(begin):.2f}" y="{top + 4}" width="{width:.2f}" height="{_LANE - 10}" '
                f'fill="{_COLOURS.get(name, _OTHER)}"><title>{escape(name)} {end - begin:.5g} {unit}</title></rect>'
            )
    bottom = _TOP + _LANE * len(lanes) + 4
    for tick in range(6):
        value = last * tick / 5
        parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:.3g} {unit}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

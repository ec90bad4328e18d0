"""Spans as a picture: lanes one below the other, bars on one axis. An SVG, drawn by matplotlib.

Of decoding, a lane is an arm and a bar a phase of a step. These spans come from the decoding loop itself: CUDA events
on a GPU, the clock elsewhere. No profiler, so nothing is slowed down by being watched.
"""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

__all__ = ["NEEDS", "can_draw", "draw_lanes", "middle_steps"]

Span = tuple[str, float, float]

NEEDS = "pictures need matplotlib: pip install 'specdec-triton[eval]'"
"""What an error says where there is none."""

_COLOURS = {"draft": "tab:orange", "score": "tab:blue", "verify": "tab:green", "commit": "tab:purple"}


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


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw_lanes(lanes: Mapping[str, Sequence[Span]], title: str, *, unit: str = "ms") -> str:
    """Draw spans, all lanes on one axis.

    Args:
        lanes: by name, spans that begin at 0, as `middle_steps` gives them.
        title: drawn on top.
        unit: of the axis.

    Returns:
        An SVG document: the same for the same lanes and release of matplotlib.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    if not can_draw():
        raise RuntimeError(NEEDS)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):  # text as text, names that do not change
        figure = Figure(figsize=(10, 1.4 + 0.32 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        for place, spans in enumerate(lanes.values()):
            bars = [(begin, end - begin) for _, begin, end in spans]
            axes.broken_barh(bars, (place - 0.35, 0.7), facecolors=[_COLOURS.get(name, "gray") for name, _, _ in spans])
        phases = dict.fromkeys(name for spans in lanes.values() for name, _, _ in spans)
        patches = [Patch(color=_COLOURS.get(name, "gray"), label=name) for name in phases]
        figure.legend(handles=patches, loc="outside upper left", ncols=max(1, len(patches)), frameon=False, title=title)
        axes.set_yticks(range(len(lanes)), labels=list(lanes))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return file.getvalue()

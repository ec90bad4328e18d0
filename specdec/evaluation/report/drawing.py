"""Charts as inline SVG, drawn by matplotlib, in the colours of the page that they stand in.

matplotlib draws with placeholder colours, and the page's own variables (`--arm-1`, `--ink`, ...) take their place, so
that one picture is right in a light and in a dark page. Text stays text, in the font of the page. The same figures give
the same bytes: identifiers are hashed with a fixed salt, and no date is written.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from specdec.evaluation.records import PLAIN, ArmInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SOFT", "Style", "check_installed", "drawn", "legend", "marker_options", "name_rows", "styles_of"]

NUM_COLOURS = 8
"""Colours of arms in the style sheet; more arms take them again, with other markers."""

WIDTH = 4.0
"""Inches of 96 pixels: what a telephone shows without making text smaller than one can read."""

SOFT = "#0a0002"
"""Stands for the colour of what is said less loudly."""

_INK, _LINE, _PAPER = "#0a0001", "#0a0003", "#0a0004"
_VARIABLES = {_INK: "--ink", SOFT: "--soft", _LINE: "--line", _PAPER: "--paper", "#0b0000": "--arm-theirs"}
_VARIABLES |= {f"#0b00{number:02x}": f"--arm-{number}" for number in range(1, NUM_COLOURS + 1)}
_MARKERS = "os^Dv*PXh<>p"

Style = tuple[str, str, bool]
"""Of an arm: its placeholder colour, its marker, and whether the marker is filled."""


def check_installed() -> None:
    """Asked before anything is measured.

    Raises:
        RuntimeError: charts cannot be drawn, as there is no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise RuntimeError("a report needs matplotlib for its charts: pip install 'specdec-triton[eval]'")


def styles_of(arms: Sequence[ArmInfo]) -> dict[str, Style]:
    """How every arm is drawn: ours in colours, those of transformers in grey with hollow markers."""
    ours = [arm.name for arm in arms if arm.library == "specdec" and arm.name != PLAIN]
    found: dict[str, Style] = {PLAIN: (_INK, "s", False)}
    found |= {
        name: (f"#0b00{place % NUM_COLOURS + 1:02x}", _MARKERS[place % len(_MARKERS)], True)
        for place, name in enumerate(ours)
    }
    others = [arm.name for arm in arms if arm.name not in found]
    return found | {name: ("#0b0000", _MARKERS[place % len(_MARKERS)], False) for place, name in enumerate(others)}


def marker_options(style: Style) -> dict[str, Any]:
    """The style as keywords of `Axes.plot`."""
    colour, marker, is_filled = style
    options = {"color": colour, "marker": marker, "markersize": 6, "markeredgecolor": colour}
    return options | {"markerfacecolor": colour if is_filled else _PAPER, "markeredgewidth": 1.3}


@contextmanager
def drawn(name: str, alternative: str, *, height: float) -> "Iterator[tuple[Axes, list[str]]]":
    """Axes to draw on; on the way out the picture is in the list.

    Args:
        name: unique in the page; of letters, digits and dashes.
        alternative: the picture in words.
        height: inches.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": _INK}
    settings |= {"axes.edgecolor": _LINE, "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT}
    settings |= {"grid.color": _LINE, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False}
    pictures: list[str] = []
    with rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True)
        axes.tick_params(length=0)
        yield axes, pictures
        stream = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.print_svg(stream, metadata=nothing)
    pictures.append(_inline(stream.getvalue(), name, alternative))


def legend(axes: "Axes", names: Sequence[str]) -> None:
    """A legend below the axes, in as many columns as the names leave room for."""
    columns = 2 if max(map(len, names), default=0) > 14 else 3
    axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=8.5, handletextpad=0.5, columnspacing=1.2)


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Names of rows at the left, the first one on top."""
    short = [name if len(name) <= 20 else f"{name[:19]}\N{HORIZONTAL ELLIPSIS}" for name in names]
    axes.set_yticks(range(len(names)), short)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _inline(svg: str, name: str, alternative: str) -> str:
    """An SVG file as an element of a page: its own identifiers, the page's colours and font."""
    svg = svg[svg.index("<svg") :].strip()
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None
    head = f'<svg class="chart" viewBox="{size[0][9:-1]}" role="img" aria-label="{_attribute(alternative)}">'
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index(">") + 1 :], flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    body = re.sub(r"<!--.*?-->\s*", "", body)
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return head + body


def _attribute(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))

"""Options that say how tokens are chosen and which drafted ones are kept, as settings of `generate`."""

import argparse
from typing import TYPE_CHECKING, Any

from specdec.commands.common.options import given

if TYPE_CHECKING:
    from specdec.loop.rules import AcceptanceRule

__all__ = ["add_acceptance", "add_sampling", "sampling_of"]

_RULES = ("auto", "greedy", "naive", "rejection", "traversal", "typical")
# which rule an option belongs to, and the rule's setting that it gives
_SETTINGS = {
    "candidates": ("naive", "drawn"),
    "replacement": ("rejection", "replacement"),
    "typical_threshold": ("typical", "threshold"),
    "typical_alpha": ("typical", "alpha"),
    "typical_root": ("typical", "root"),
}


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Options of the acceptance rule."""
    lossless = "which drafted tokens are kept; all but typical are lossless (default: %(default)s)"
    candidates = "with naive: the drafter's most probable tokens (default), or drawn ones, which is MCNS"
    replacement = "with rejection: draw siblings independently (MCSS with replacement), or not (default)"
    threshold = "with typical: a probability that is always enough (default: 0.09)"
    alpha = "with typical: factor of exp(-entropy) (default: 0.3; Hydra takes the threshold's square root)"
    root = "with typical: the token behind an accepted path is the most probable one (default), or drawn"
    parser.add_argument("--acceptance", choices=_RULES, default="auto", help=lossless)
    parser.add_argument("--candidates", choices=("best", "drawn"), help=candidates)
    parser.add_argument("--replacement", action=argparse.BooleanOptionalAction, help=replacement)
    parser.add_argument("--typical-threshold", type=float, metavar="P", help=threshold)
    parser.add_argument("--typical-alpha", type=float, metavar="A", help=alpha)
    parser.add_argument("--typical-root", choices=("greedy", "sampled"), help=root)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options of the target's law."""
    greedy = "without this and the next three the most probable tokens are taken"
    settings = f"sample, with the model's own settings where none is given here; {greedy}"
    parser.add_argument("--do-sample", action="store_true", help=settings)
    parser.add_argument("--temperature", type=float, help="implies --do-sample; 0 takes the most probable tokens")
    parser.add_argument("--top-p", type=float, help="implies --do-sample")
    parser.add_argument("--top-k", type=int, help="implies --do-sample; 0 keeps all tokens")
    parser.add_argument("--seed", type=int, help="of sampling: the same seed gives the same text")


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """How tokens are chosen, as settings of `generate`.

    Raises:
        ValueError: an option that the rule does not have, or a value that it refuses.
    """
    settings = given(options, "temperature", "top_p", "top_k")
    do_sample = (options.do_sample or bool(settings)) and options.temperature != 0
    acceptance = _rule_of(options)
    if options.typical_root == "sampled" and not do_sample:
        raise ValueError("--typical-root: expected --do-sample or a temperature over 0 with sampled, got neither")
    return {"do_sample": do_sample, "acceptance": acceptance, **(settings if do_sample else {})}


def _rule_of(options: argparse.Namespace) -> "str | AcceptanceRule":
    """The name of the rule, or the rule where settings of it are given."""
    name, settings = options.acceptance, {}
    for option, value in given(options, *_SETTINGS).items():
        rule, setting = _SETTINGS[option]
        if name != rule:
            raise ValueError(f"--{option.replace('_', '-')}: expected --acceptance {rule} with it, got {name}")
        settings[setting] = value == "drawn" if option == "candidates" else value
    if not settings:
        return str(name)
    from specdec.loop.rules import RULES

    try:
        return RULES[name](**settings)
    except ValueError as error:  # which names the setting
        raise ValueError(f"--{name}-{error}") from None

"""What a row asks of the logits that it samples from: five numbers a row, in one tensor on the device.

They are data, so that a captured step serves any values, and rows of one batch may differ. Columns of [B, 5] float32:

    0  temperature          divides the logits; over 0
    1  top_k                how many tokens to keep; 0: all
    2  top_p                keep the most probable tokens that together reach it; 1: all
    3  min_p                drop tokens with less than this share of the largest probability; 0: none
    4  repetition_penalty   over 0; 1 is none

Values on the device are looked at by nobody; whoever writes them there checks them, as `warp_settings` does.
"""

import torch

__all__ = ["NUM_WARP_SETTINGS", "warp_settings"]

NUM_WARP_SETTINGS = 5

_LARGEST_TOP_K = 2**24  # whole numbers above have no float32 of their own, and no vocabulary is larger


def warp_settings(
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The settings of all rows as `warp_logits` takes them; by default they do nothing.

    Args:
        temperature: divides the logits, over 0.
        top_k: how many tokens to keep, and those equal to the last; None: all.
        top_p: keep the most probable tokens that together reach it, and those equal to the last; None or 1: all.
        min_p: drop tokens with less than this share of the largest probability; None: none.
        repetition_penalty: over 0; 1 is none.
        device: where they are to lie.

    Returns:
        [1, 5] float32.

    Raises:
        ValueError: a number out of range.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: expected more than 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected 1 or more, got {top_k}")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p: expected 0 to 1, got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected 0 to 1, got {min_p}")
    if not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty: expected more than 0, got {repetition_penalty}")
    kept, share = min(top_k or 0, _LARGEST_TOP_K), 1.0 if top_p is None else top_p
    row = [temperature, kept, share, min_p or 0.0, repetition_penalty]
    return torch.tensor([row], dtype=torch.float32, device=device)

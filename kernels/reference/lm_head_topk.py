"""Eager reference of kernels.lm_head_topk: the definition, and what CPU decoding runs."""

import torch

from specdec.kernels.common.topk import TopK

__all__ = ["lm_head_topk"]


def lm_head_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    k: int,
    down: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
    upcast: bool = True,
) -> TopK:
    """Logits of K heads, their k best tokens and their log-sum-exp.

    Shapes, dtypes and meaning are those of `specdec.kernels.lm_head_topk.lm_head_topk`; arguments are not checked.
    `upcast=False` computes the products in the dtype of `x`, the rest in float32; a bias is added before the rounding.
    """
    dtype = x.dtype
    if upcast:
        x, weight = x.double(), weight.double()
        down, bias = (None if tensor is None else tensor.double() for tensor in (down, bias))
    h = x if down is None else x @ down.mT  # [K, B, r]
    # with a bias as PyTorch's own linear layer, which rounds their sum once
    logits = h @ weight.mT if bias is None else torch.baddbmm(bias[:, None], h, weight.expand(h.shape[0], -1, -1).mT)
    logits = logits.transpose(0, 1)  # [B, K, V]
    if rounded:
        logits = logits.to(dtype).to(logits.dtype)
    if not upcast:
        logits = logits.float()
    is_nan = logits.isnan()
    logits = logits.masked_fill(is_nan, float("-inf")) + 0.0  # -0.0 becomes 0.0, so that no sort tells them apart
    # the only sort of PyTorch that keeps equal values in the order of their tokens; topk leaves it open
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return TopK(
        values=values[..., :k].float().contiguous(),
        tokens=tokens[..., :k].to(torch.int32).contiguous(),
        logsumexp=torch.logsumexp(logits, dim=-1).float(),
        has_nan=is_nan.any(dim=-1),
    )

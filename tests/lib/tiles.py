"""`specdec.kernels.common.primitives.softmax_tiles` in PyTorch."""

import torch


def torch_tiles(logits, config, *, budget=None, moment=False):
    num_tiles, block = config.blocks["NUM_TILES"], config.blocks["BLOCK_V"]
    x = logits.float().masked_fill(logits.isnan(), float("-inf"))
    if budget is not None:
        x = x.masked_fill((budget <= 0)[:, None, None], float("-inf"))
    x = torch.nn.functional.pad(x, (0, num_tiles * block - x.shape[-1]), value=float("-inf"))
    x = x.unflatten(-1, (num_tiles, block))
    largest = x.amax(-1)
    shifted = x - largest.masked_fill(largest == float("-inf"), 0.0)[..., None]
    e = shifted.exp()
    moments = torch.where(e > 0, shifted, 0.0).mul(e).sum(-1) if moment else None
    return largest.contiguous(), e.sum(-1), moments

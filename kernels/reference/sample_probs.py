"""Eager reference of kernels.sample_probs: the definition, and what CPU decoding runs."""

import torch

from specdec.kernels.common.philox import philox

__all__ = ["sample_probs", "sample_race", "warp_logits"]

_TILE, _LANES = 4096, 1024
_MASK = 0xFFFFFFFF


def warp_logits(
    logits: torch.Tensor,
    settings: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    parent: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    *,
    upcast: bool = True,
) -> torch.Tensor:
    """Process the logits of every node as transformers processes those of one sequence.

    Shapes, dtypes and meaning are those of `specdec.kernels.sample_probs.warp_logits`; arguments are not checked.
    `upcast=False` computes in float32 instead of float64. A filter that no row asks for is left out.
    """
    x = logits.to(torch.float64 if upcast else torch.float32)
    x = x.masked_fill(x.isnan(), float("-inf"))
    if settings is None:
        return x.float()
    temperature, top_k, top_p, min_p, penalty = settings.to(x.dtype)[:, :, None, None].unbind(1)  # [B or 1, 1, 1]
    if (penalty != 1).any():
        seen = _seen_tokens(x.shape, tokens, parent, history, x.device)
        penalised = torch.where(x < 0, x * penalty, x / penalty)
        x = torch.where(seen, penalised, x)
    x = x / temperature
    if (top_k > 0).any():
        ordered = x.topk(min(int(top_k.max()), x.shape[-1]), dim=-1).values
        last = top_k.long().clamp(1, x.shape[-1]) - 1
        least = ordered.gather(-1, last.expand(*x.shape[:2], 1))
        x = x.masked_fill((x < least) & (top_k > 0), float("-inf"))
    if (top_p < 1).any():
        ordered, order = x.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # the mass of strictly larger logits decides, so equal ones share their fate
        above = probs.cumsum(-1) - probs
        first_equal = torch.searchsorted(-ordered, -ordered)
        kept = above.gather(-1, first_equal) < top_p
        kept |= (ordered == ordered[..., :1]) | (top_p >= 1)
        x = x.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), float("-inf"))
    if (min_p > 0).any():
        probs = x.softmax(-1)
        x = x.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), float("-inf"))
    return x.float()


def _seen_tokens(
    shape: torch.Size,
    tokens: torch.Tensor | None,
    parent: torch.Tensor | None,
    history: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """[B, N, V] bool: the token is in the row's history or on the path from the root to the node."""
    batch, num_nodes, vocab_size = shape
    seen = torch.zeros(shape, dtype=torch.bool, device=device)
    for b in range(batch):
        if history is not None:
            known = [token for token in history[b].tolist() if 0 <= token < vocab_size]
            seen[b, :, known] = True
        if tokens is not None and parent is not None:
            row, parents = tokens[b].tolist(), parent.expand(batch, -1)[b].tolist()
            for n in range(num_nodes):
                node = n
                while node >= 0:
                    if 0 <= row[node] < vocab_size:
                        seen[b, n, row[node]] = True
                    node = parents[node]
    return seen


def sample_race(
    logits: torch.Tensor, row_ids: torch.Tensor, step: torch.Tensor, *, seed: int, upcast: bool = True
) -> torch.Tensor:
    """Draw one token per node by an exponential race.

    Shapes, dtypes and meaning are those of `specdec.kernels.sample_probs.sample_race`; arguments are not checked.
    `upcast=False` computes in float32 instead of float64.
    """
    num_nodes, vocab_size = logits.shape[1:]
    dtype = torch.float64 if upcast else torch.float32
    v = torch.arange(vocab_size, device=logits.device)
    node = torch.arange(num_nodes, device=logits.device)
    counters = (
        (v // _TILE * _LANES + v % _LANES)[None, None],
        row_ids.long()[:, None, None] & _MASK,
        step.long()[None, None] & _MASK,
        node[None, :, None],
    )
    words = philox(counters, seed)
    word = torch.stack(words)[v % _TILE // _LANES, :, :, v].movedim(0, -1)
    uniform = ((word.double() + 0.5) / 2**32).clamp(max=1 - 2**-24).to(dtype)
    exponential = -torch.log1p(-uniform)  # E
    x = logits.to(dtype)
    x = x.masked_fill(x.isnan(), float("-inf"))
    return (x - exponential.log()).argmax(-1).int()  # argmax p / E; the first of equal ones


def sample_probs(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    step: torch.Tensor,
    settings: torch.Tensor | None,
    tokens: torch.Tensor | None,
    parent: torch.Tensor | None,
    history: torch.Tensor | None,
    *,
    seed: int,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process the logits of every node and draw one token from each.

    Shapes, dtypes and meaning are those of `specdec.kernels.sample_probs.sample_probs`; arguments are not checked.
    `upcast=False` computes in float32 instead of float64.
    """
    processed = warp_logits(logits, settings, tokens, parent, history, upcast=upcast)
    return sample_race(processed, row_ids, step, seed=seed, upcast=upcast), processed

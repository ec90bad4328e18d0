"""Which texts went on how after what the text at hand ends with: occurrences, and the tree of their continuations.

Equation:   reach(x_1 .. x_d) = max_L prod_{k=1}^{d} c_L(x_1 .. x_k) / (c_L(x_1 .. x_{k-1}) + 1 / (L + k - 1))
            c_L counts the occurrences of the text's last L tokens that go on like this, c_L() all of them
Source:     suffix decoding (arXiv:2411.04975) section 3, which takes c(child) / c(parent) of one L; the term
            1 / (L + k - 1) and the maximum are ours, see docs/drafters/suffix.md
Shapes:     B rows; P occurrences of each; D the longest match; T tokens of a continuation

A suffix tree would hold the same counts. These come from comparing every place of a text with its end, which has static
shapes, takes nothing but the text itself, and runs on the device.
"""

from dataclasses import dataclass

import torch

__all__ = ["Occurrences", "PathPool", "find_occurrences", "rank_paths"]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Places where the end of a text occurred before, and what followed them.

    Attributes:
        match: [B, P] int64, how many tokens before each place are those before the end; 0: no occurrence.
        tokens: [B, P, T] int32 that followed, -1 from where a text ends on.
    """

    match: torch.Tensor
    tokens: torch.Tensor

    def with_others(self, others: "Occurrences") -> "Occurrences":
        """These and others of the same texts."""
        return Occurrences(torch.cat((self.match, others.match), 1), torch.cat((self.tokens, others.tokens), 1))


@dataclass(frozen=True, slots=True)
class PathPool:
    """The likeliest continuations, a path a candidate, each with its last token.

    Attributes:
        tokens: [B, M] int32.
        reach: [B, M] float32, 0 where there is none.
        parent: [B, M] int32 place of the path without its last token; -1 if that is empty.
    """

    tokens: torch.Tensor
    reach: torch.Tensor
    parent: torch.Tensor


def find_occurrences(
    source: torch.Tensor, usable: torch.Tensor, end: torch.Tensor, *, num_occurrences: int, depth: int
) -> Occurrences:
    """The occurrences of the longest, most recent matches in a source.

    Args:
        source: [B or 1, D + S] int32 tokens, -1 between texts and in the D columns in front.
        usable: [B or 1, S] bool, the places whose following token is known.
        end: [B, D] int32 last tokens of each row's text, the last one first; -2 in front of its beginning.
        num_occurrences: P.
        depth: T.
    """
    longest, num_places = end.shape[1], source.shape[1] - end.shape[1]
    running = usable
    match = torch.zeros(end.shape[0], num_places, dtype=torch.int16, device=end.device)
    for back in range(longest):
        first = longest - back
        running = running & (source[:, first : first + num_places] == end[:, back, None])
        match += running
    # of equal matches the later place; a place that does not match has the key of its number alone
    keys = match.long() * num_places + torch.arange(num_places, device=end.device)
    best = keys.topk(min(num_occurrences, num_places), 1).values
    match, place = best // num_places, best % num_places
    behind = place[:, :, None] + torch.arange(1, depth + 1, device=end.device) + longest
    is_inside = behind < source.shape[1]
    rows = source.expand(end.shape[0], -1)
    tokens = rows.gather(1, behind.clamp(max=source.shape[1] - 1).flatten(1)).view(behind.shape)
    followed = (is_inside & (tokens >= 0) & (match > 0)[:, :, None]).cumprod(2, dtype=torch.int32).bool()
    return Occurrences(match, torch.where(followed, tokens, -1))


def rank_paths(found: Occurrences, *, longest: int, num_paths: int, min_probability: float) -> PathPool:
    """The `num_paths` paths of the largest reach; with every path those that it goes through.

    Args:
        found: occurrences.
        longest: D.
        num_paths: M, at most P * T.
        min_probability: paths of less reach are left out.
    """
    tokens, device = found.tokens, found.tokens.device
    batch_size, num_found, depth = tokens.shape
    is_there = tokens >= 0
    # [B, P, P, T]: both go on alike up to here
    differs = (tokens[:, :, None] != tokens[:, None]) | ~is_there[:, :, None]
    alike = differs.cumsum(3, dtype=torch.int32) == 0
    lengths = torch.arange(1, longest + 1, device=device)
    matches = (found.match[:, :, None] >= lengths).float()  # [B, P, D]
    counts = torch.einsum("bpqt,bqd->bptd", alike.float(), matches)
    before = torch.cat((matches.sum(1)[:, None, None].expand(-1, num_found, 1, -1), counts[:, :, :-1]), 2)
    escape = 1 / (lengths + torch.arange(depth, device=device)[:, None])  # [T, D]
    reach = (counts / (before + escape)).cumprod(2).amax(3)  # [B, P, T]

    # the first occurrence that goes on like this stands for all
    first = alike.int().argmax(2)  # [B, P, T]
    numbers = torch.arange(num_found, device=device)[:, None]
    is_path = is_there & (first == numbers) & (reach >= min_probability)
    reach = torch.where(is_path, reach, 0.0).flatten(1)
    # of equal reach that of the longer, later match: one number orders by both, as topk leaves ties open
    bits = reach.view(torch.int32).long()
    keys = (bits << 32) - torch.arange(num_found * depth, device=device)
    best = keys.topk(num_paths, 1).indices
    place_of = torch.full((batch_size, num_found * depth), -1, device=device)
    place_of.scatter_(1, best, torch.arange(num_paths, device=device).expand(batch_size, -1))
    stands_at = (first * depth + torch.arange(depth, device=device)).flatten(1)
    above = stands_at.gather(1, (best - 1).clamp(min=0))  # the path of one token less
    is_first = best % depth == 0
    parent = torch.where(is_first, -1, place_of.gather(1, above))
    # rounding may give a path and its child one reach, of which only the child was taken
    kept = torch.where(is_first | (parent >= 0), reach.gather(1, best), 0.0)
    return PathPool(tokens.flatten(1).gather(1, best).clamp(min=0), kept, parent.int())

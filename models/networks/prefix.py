"""What a feature-level drafter remembers of the committed text: its own keys and values, and what it has not read yet.

Pair t is the target's state h_t with the token x_{t+1} that follows it; a text of n tokens and its root make n pairs.
After a step the target has told new states for the root and the accepted nodes, a ragged handful per row. The next
draft reads them in one pass of fixed width, padded at the end, and they join the cache. What the drafter computed for
its own guesses meanwhile is overwritten: keys and values are always made from true states of the target.

    start(...)                 once per chunk of the prompt: its pairs, all but the last one, whose token is the root
    pending = read(root)       once per draft: the pairs to run now, and how
    advance()                  their keys and values belong to the committed text now
    commit(verdict, features)  once per step: the pairs that came in

Drafts may be left out: pairs then wait behind those that were there, up to `max_new` of them.
"""

from dataclasses import dataclass

import torch

from specdec.kernels.commit_pairs import commit_pairs
from specdec.kernels.common.launch import resolve_backend
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.common.cache import KVCache, RowState
from specdec.models.common.passes import PromptPass, TreePass
from specdec.models.networks.layer import CachedAttention, DraftLayerConfig, rotary_table

__all__ = ["FeaturePrefix", "Pairs"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs to run through a draft network, padded at the end of each row.

    Attributes:
        features: [B, T, F] states of the target.
        tokens: [B, T] int32 or int64, the token after each state.
        counts: [B] int32, pairs that are real; 0 for a finished row.
        newest: [B] and [B] int64, the rows and the place of each one's last real pair.
        attend: how the network's layers attend.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    newest: tuple[torch.Tensor, torch.Tensor]
    attend: CachedAttention

    @property
    def positions(self) -> torch.Tensor | None:
        """[B, T] int64, index of each pair in the text, where the network has to know."""
        return self.attend.positions

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """Of `states [B, T, ...]`, the one at each row's last real pair: [B, ...]."""
        return states[self.newest]


class FeaturePrefix:
    """The committed pairs of a batch.

    Args:
        cache: empty cache of the draft network, with a slot per committed token, for `max_new` pairs beyond, and for
            whatever the drafter itself writes beyond.
        layer: sizes of the network's layers.
        max_new: most pairs that come in between two drafts.
        feature_size: F, width of the target's states.
        keep: newest pairs that are run again with every draft, beside the new ones. Falcon keeps k - 1, so that the
            newest k pairs are one block.
        may_ask: whether `read` may ask the device how many pairs wait, and give no more than that.
    """

    def __init__(
        self,
        cache: KVCache,
        layer: DraftLayerConfig,
        *,
        max_new: int,
        feature_size: int,
        keep: int = 0,
        may_ask: bool = False,
    ) -> None:
        device, batch_size = cache.lengths.device, cache.lengths.shape[0]
        self.cache = cache
        self.width = max_new + keep
        self.keep = keep
        self._may_ask = may_ask
        self._was_read = False  # since the last commit; the same at the end of every step of one kind
        # looked up by the kernel that also writes the cache; its reference is the slower way on a CPU
        has_kernels = resolve_backend(cache.lengths, cache.backend) == "triton"
        self._table = rotary_table(layer, cache.capacity, device) if has_kernels else None
        self._places = torch.arange(cache.capacity, dtype=torch.int32, device=device)[None]
        self._rows = torch.arange(batch_size, device=device)
        self._chain = pack_words(torch.ones(1, self.width, self.width, device=device).tril().bool())
        # what is pending: always these tensors, as a captured step is replayed on their addresses
        self._features = torch.zeros(batch_size, self.width, feature_size, dtype=cache.data.dtype, device=device)
        self._tokens = torch.zeros(batch_size, self.width, dtype=torch.int32, device=device)
        self._counts = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._kept = torch.zeros_like(self._counts)
        self._last = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @property
    def counts(self) -> torch.Tensor:
        """[B] int32, real pairs that the next `read` gives; 0 for a finished row."""
        return self._counts

    def num_places(self) -> int:
        """Pairs of a row that the next `read` gives, padding included."""
        return max(1, int(self._counts.max())) if self._may_ask else self.width

    @property
    def kept(self) -> torch.Tensor:
        """[B] int32, how many of these were given by the last `read` too; 0 after a prompt."""
        return self._kept

    def row_state(self) -> RowState:
        """What belongs to single rows: all that is committed, and what is pending."""
        return self.cache, self._features, self._tokens, self._counts, self._kept, self._last

    def start(
        self, tokens: torch.Tensor, lengths: torch.Tensor, features: torch.Tensor, *, first: int = 0
    ) -> Pairs | None:
        """Take in a prompt, or its next chunk.

        Args:
            tokens: [B, T] int64 tokens of the whole prompt, right-padded.
            lengths: [B] int32 prompt lengths.
            features: [B, n, F] the target's states of the prompt tokens `first .. first + n - 1`.
            first: where the chunk begins; 0 forgets whatever was there.

        Returns:
            The pairs of these states whose token is known, padded; run them through the network. Their `counts` leave
            out the newest pairs of a row, those that the first `read` gives. None if there is no such pair.
        """
        num_places, num_pairs = features.shape[1], min(features.shape[1], tokens.shape[1] - 1 - first)
        self.cache.lengths.copy_((lengths - 1 - self.keep).clamp(min=0))
        pending = self.cache.lengths.long()[:, None] + self._places[:, : self.width]
        place = (pending - first)[:, :, None].expand(-1, -1, features.shape[2])
        found = features.gather(1, place.clamp(0, num_places - 1))
        # places before the chunk were found in theirs; those behind it, or behind the row, hold some state or other
        self._features.copy_(found if first == 0 else torch.where(place >= 0, found, self._features))
        self._tokens.copy_(tokens.gather(1, (pending + 1).clamp(max=tokens.shape[1] - 1)))
        self._counts.copy_(lengths - self.cache.lengths)
        self._kept.zero_()
        self._last.copy_((self._counts - 1).clamp(min=0))
        self._was_read = False
        if num_pairs <= 0:
            return None
        visible = PromptPass(start=first, num_tokens=num_pairs, batch_size=tokens.shape[0], device=tokens.device)
        counts = (self.cache.lengths - first).clamp(0, num_pairs)
        return Pairs(
            features=features[:, :num_pairs],
            tokens=tokens[:, first + 1 : first + 1 + num_pairs],
            counts=counts,
            newest=(self._rows, (counts - 1).clamp(min=0).long()),
            attend=self.attention(visible),
        )

    def skip(self, root: torch.Tensor) -> None:
        """Leave the pending pairs to a later `read`; `root [B]` int32 is the token of each row's last one."""
        self._tokens.scatter_(1, self._last[:, None], root[:, None])

    def read(self, root: torch.Tensor, ancestors: torch.Tensor | None = None) -> Pairs:
        """The pending pairs, in one causal pass behind the cache.

        Args:
            root: [B] int32 last emitted token: that of each row's last pair.
            ancestors: [B or 1, `num_places`, W] int32 words of what each pair sees of the pending ones; causal by
                default.
        """
        self.skip(root)
        if ancestors is None:
            num_places = self.num_places()
            ancestors = self._chain[:, :num_places, : (num_places + 31) // 32]
        num_places = ancestors.shape[1]
        visible = self.visible(self._places[:, :num_places], ancestors)
        features, tokens = self._features[:, :num_places], self._tokens[:, :num_places]
        return Pairs(features, tokens, self._counts, (self._rows, self._last), self.attention(visible))

    def visible(self, depth: torch.Tensor, ancestors: torch.Tensor, *, first_node: int = 0) -> TreePass:
        """A pass over nodes behind the cache.

        Args:
            depth: [B or 1, N] int32 position of each node, counted from the first one behind the cache.
            ancestors: [B or 1, N, W] int32 words over the slots behind the cache.
            first_node: slot of the first node, counted from the first one behind the cache.
        """
        return TreePass(
            lengths=self.cache.lengths,
            depth=depth,
            ancestors=ancestors,
            first_node=first_node,
            num_nodes=depth.shape[1],
            backend=resolve_backend(depth, self.cache.backend),
        )

    def attention(self, visible: PromptPass | TreePass, asking: TreePass | None = None) -> CachedAttention:
        """Attention of a pass, or of its last nodes `asking` alone, to this text."""
        return CachedAttention(self.cache, visible, self._table, self._places, asking)

    def advance(self) -> None:
        """Count the pairs of the last `read` as committed, all but those to keep."""
        self._was_read = True
        if self.keep:
            torch.clamp(self._counts, max=self.keep, out=self._kept)
        self.cache.lengths += self._counts - self._kept if self.keep else self._counts

    def commit(self, verdict: Verdict, features: torch.Tensor) -> None:
        """Take in the accepted nodes; `features [B, N, F]` are the target's at all nodes.

        Rows that have finished gain nothing.
        """
        step = verdict.path, verdict.emitted, verdict.num_accepted
        num_new, was_read, self._was_read = verdict.path.shape[1], self._was_read, False
        keep = self.keep if was_read else self.width - num_new  # what nobody has read stays, all of it
        if not self._may_ask:
            pending = self._features, self._tokens, self._counts, self._last
            commit_pairs(*pending, features, *step, keep=keep, backend=self.cache.backend)
            return
        # places that all rows have filled, and those that none will, need not be touched
        first = 0 if was_read else int(self._counts.min())
        keep = self.keep if was_read else int(self._counts.max()) - first
        places, counts = slice(first, first + keep + num_new), self._counts - first
        pending = self._features[:, places], self._tokens[:, places], counts, self._last
        commit_pairs(*pending, features, *step, keep=keep, backend=self.cache.backend)
        torch.add(counts, first, out=self._counts)
        self._last.copy_((self._counts - 1).clamp_(min=0))

"""Logits processors on trees: every node is processed with its own path as its history, never approximately.

The common settings (temperature, top-k, top-p, min-p, repetition penalty) are one op over the whole tree. Whatever else
transformers knows, and any `LogitsProcessor` of the user's, is called as transformers would call it for a sequence that
ends in that node: once per row and depth, with the nodes of that depth as its batch.

The values of the common settings are data on the device, which the op reads: one captured step serves all of them. The
calls that set nothing have another one, without the op.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from specdec.drafting.candidates import DraftLaw
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.launch import Backend
from specdec.kernels.sample_probs import WarpSettings, warp_logits
from specdec.models.target.target import Target

__all__ = ["PROCESSOR_FIELDS", "WARPER_FIELDS", "Processing", "warp_settings"]

_AT_ONCE = frozenset({"repetition_penalty", "temperature", "top_k", "top_p", "min_p"})
PROCESSOR_FIELDS = frozenset(
    "sequence_bias repetition_penalty no_repeat_ngram_size bad_words_ids min_length min_new_tokens "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens renormalize_logits".split()
)
"""Fields of `GenerationConfig` that process logits whether or not tokens are sampled."""
WARPER_FIELDS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"})
"""Fields that act on sampling alone."""


class Processing:
    """What one call does to the target's logits.

    Args:
        config: fields of `PROCESSOR_FIELDS` and `WARPER_FIELDS`; None means off.
        do_sample: whether the warpers act.
        prompt_lengths: tokens of each row's prompt.
        max_new_tokens: most tokens that a row may emit.
        width: length of the padded prompts, by which `min_length` counts.
        stop_tokens: tokens that end a row, which some processors hold back.
        custom: the user's processors; one of a type that the config also asks for takes its place.
        allowed_tokens: transformers' `prefix_allowed_tokens_fn`.
        backend: what runs the kernels; by default decided by the device.

    Attributes:
        settings: [1, 5] float32 the values of the common settings, for all rows, on `device`.
    """

    def __init__(
        self,
        config: GenerationConfig,
        *,
        do_sample: bool,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
        width: int,
        stop_tokens: Sequence[int] = (),
        custom: Sequence[Callable[..., torch.Tensor]] = (),
        allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None = None,
        device: torch.device | str = "cpu",
        backend: Backend | None = None,
    ) -> None:
        self._asked = _active(config, do_sample=do_sample)
        at_once = {name: value for name, value in self._asked.items() if name in _AT_ONCE}
        self.settings = WarpSettings(**at_once).on(device)
        self._backend = backend
        self._stops = frozenset(stop_tokens)
        self._rows: list[LogitsProcessorList] | None = None
        if custom or allowed_tokens is not None or self._asked.keys() - _AT_ONCE:
            self._rows = []
            for row, length in enumerate(prompt_lengths):
                processors = _processors(self._asked, length, max_new_tokens, width, stop_tokens, device)
                if allowed_tokens is not None:
                    processors.insert(
                        next((i for i, (name, _) in enumerate(processors) if name in _AFTER_PREFIX), len(processors)),
                        ("prefix_allowed_tokens_fn", _Allowed(allowed_tokens, row)),
                    )
                self._rows.append(_merge(processors, custom))

    @classmethod
    def none(cls) -> "Processing":
        """Logits as they come."""
        return cls(GenerationConfig(), do_sample=False, prompt_lengths=(), max_new_tokens=0, width=0)

    @classmethod
    def by_rows(cls, target: Target) -> "Processing":
        """The common settings, whatever each row's are: steps read them where `law` is told that they are."""
        sampled = GenerationConfig(do_sample=True, temperature=0.5)
        sizes: dict[str, Any] = {"prompt_lengths": (), "max_new_tokens": 0, "width": 0}
        return cls(sampled, do_sample=True, **sizes, device=target.device, backend=target.backend)

    def law(self, settings: torch.Tensor) -> DraftLaw:
        """The law for drafters: the same warpers, without what depends on the path.

        Args:
            settings: [B, 5] float32 the values of each row, as `self.settings`, at the address where steps read them.
        """
        return DraftLaw(settings=None if self.is_idle else settings, backend=self._backend)

    @property
    def signature(self) -> str | None:
        """Calls of one signature can share a captured step; None if a processor runs on the host."""
        if self._rows is not None:
            return None
        return "idle" if self.is_idle else "warped"

    @property
    def is_idle(self) -> bool:
        """Whether it leaves logits as they come."""
        return not self._asked and self._rows is None

    def __call__(
        self,
        logits: torch.Tensor,
        tree: DraftTree | None,
        history: torch.Tensor,
        budget: torch.Tensor,
        settings: torch.Tensor,
    ) -> torch.Tensor:
        """Process the logits of every node.

        Args:
            logits: [B, N, V] the target's.
            tree: whose nodes they belong to; None for the end of the prompt (N = 1).
            history: [B, H] int32 the text so far, -1 in places without a token; with the tree's root at its end.
            budget: [B] int32 tokens that each row may still emit.
            settings: as of `law`.

        Returns:
            [B, N, V], float32 if anything was done. Nodes that cannot be reached may be left as they are: those of
            finished rows, below a token that is impossible or ends the text, or beyond the budget.

        Raises:
            ValueError: a processor returned something else than finite or -inf scores of the shape it was given.
        """
        if self.is_idle:
            return logits
        if self._rows is None:
            return warp_logits(
                logits,
                settings,
                None if tree is None else tree.tokens,
                None if tree is None else tree.parent,
                history,
                backend=self._backend,
            )
        processed = logits.to(torch.float32, copy=True)
        parents = [[-1]] * len(self._rows) if tree is None else tree.parent.expand(len(self._rows), -1).tolist()
        for row, (processors, budget_left) in enumerate(zip(self._rows, budget.tolist(), strict=True)):
            text = history[row][history[row] >= 0].long()
            text = text if tree is None else text[:-1]  # the root is in the tree
            tokens = text.new_empty(0) if tree is None else tree.tokens[row].long()
            self._process_row(processed[row], text, tokens, parents[row], processors, budget_left)
        return processed

    def _process_row(
        self,
        scores: torch.Tensor,
        text: torch.Tensor,
        tokens: torch.Tensor,
        parent: list[int],
        processors: Sequence[Callable[..., torch.Tensor]],
        budget_left: int,
    ) -> None:
        """Process `scores [N, V]` of one row in place, depth by depth, at all nodes that can be reached.

        No processor is asked about the others: under a grammar nothing at all may follow a text that breaks it.
        """
        listed = tokens.tolist()
        paths = {0: [0] if listed else []}
        nodes = [0]
        while nodes and budget_left > 0:
            places = torch.tensor([paths[node] for node in nodes], dtype=torch.int64, device=tokens.device)
            ids = torch.cat((text.expand(len(nodes), -1), tokens[places]), 1)
            scores[nodes] = _apply(processors, ids, scores[nodes]).to(scores.dtype)
            children = [node for node in range(1, len(parent)) if parent[node] in nodes]
            own = scores[[parent[node] for node in children], [listed[node] for node in children]].tolist()
            allowed = [node for node, score in zip(children, own, strict=True) if score > -torch.inf]
            nodes = [node for node in allowed if listed[node] not in self._stops]
            paths |= {node: [*paths[parent[node]], node] for node in nodes}
            budget_left -= 1


def _apply(processors: Sequence[Callable[..., torch.Tensor]], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What the processors make of `scores [n, V]` after the texts `ids [n, T]`, checked."""
    for processor in processors:
        result = processor(ids, scores)
        name = type(processor).__name__
        if not isinstance(result, torch.Tensor) or result.shape != scores.shape:
            got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(f"logits_processor: expected scores {list(scores.shape)} from {name}, got {got}")
        if result.isnan().any() and not scores.isnan().any():
            raise ValueError(f"logits_processor: expected scores without NaN from {name}, got NaN")
        if not torch.isfinite(result).any(-1).all():
            raise ValueError(f"logits_processor: expected a token that is still possible, got none from {name}")
        scores = result
    return scores


class _Allowed:
    """transformers' `prefix_allowed_tokens_fn` for one row."""

    def __init__(self, allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> None:
        self.allowed = allowed
        self.row = row

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(scores, -torch.inf)
        for index, text in enumerate(ids):
            tokens = self.allowed(self.row, text)
            if len(tokens) == 0:
                raise ValueError("prefix_allowed_tokens_fn: expected at least one token, got none")
            if not 0 <= min(tokens) <= max(tokens) < scores.shape[-1]:
                raise ValueError(
                    f"prefix_allowed_tokens_fn: expected token ids from 0 to {scores.shape[-1] - 1}, got {tokens!r}"
                )
            kept[index, tokens] = scores[index, tokens]
        return kept


def _active(config: GenerationConfig, *, do_sample: bool) -> dict[str, Any]:
    """The settings that do something."""
    settings = {name: getattr(config, name, None) for name in PROCESSOR_FIELDS}
    if do_sample:
        settings |= {name: getattr(config, name, None) for name in WARPER_FIELDS}
    if settings["min_new_tokens"] is not None:  # as transformers: it wins, also with 0
        settings["min_length"] = None
    return {name: value for name, value in settings.items() if value is not None and value != _NEUTRAL.get(name)}


def warp_settings(config: GenerationConfig, *, do_sample: bool) -> WarpSettings:
    """The common settings of a call, which are data of its rows.

    Raises:
        NotImplementedError: a setting that is none of them, by name.
    """
    asked = _active(config, do_sample=do_sample)
    others = sorted(asked.keys() - _AT_ONCE)
    if others:
        known = ", ".join(sorted(_AT_ONCE))
        raise NotImplementedError(f"{others[0]}: expected its default, as rows are processed by {known} alone")
    return WarpSettings(**asked)


_NEUTRAL: dict[str, float] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "remove_invalid_values", "renormalize_logits"), 0),
}
"""Values with which a setting does nothing."""
# The order of transformers' own list; the user's processors go before the warpers.
_AFTER_PREFIX = (
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff renormalize_logits"
).split()


def _processors(
    settings: dict[str, Any],
    length: int,
    max_new_tokens: int,
    width: int,
    stop_tokens: Sequence[int],
    device: torch.device | str,
) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """The processors of one row whose prompt has `length` tokens, by the setting that asks for each, in order."""
    stops = torch.tensor(list(stop_tokens), dtype=torch.int64, device=device)
    holds_back = len(stop_tokens) > 0
    begin = length + 1 if length == 1 and "forced_bos_token_id" in settings else length  # behind the forced token
    makers: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": hf.SequenceBiasLogitsProcessor,
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda value: hf.NoBadWordsLogitsProcessor(value, stops if holds_back else None),
        # transformers counts the padding of a batch; a row's own length gives the same number of new tokens
        "min_length": lambda value: hf.MinNewTokensLengthLogitsProcessor(length, value - width, stops, device=device),
        "min_new_tokens": lambda value: hf.MinNewTokensLengthLogitsProcessor(length, value, stops, device=device),
        "forced_bos_token_id": hf.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda value: hf.ForcedEOSTokenLogitsProcessor(
            length + max_new_tokens, value, device=device
        ),
        "remove_invalid_values": lambda _: hf.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda value: hf.ExponentialDecayLengthPenalty(value, stops, length),
        "suppress_tokens": lambda value: hf.SuppressTokensLogitsProcessor(value, device=device),
        "begin_suppress_tokens": lambda value: hf.SuppressTokensAtBeginLogitsProcessor(value, begin, device=device),
        "temperature": lambda value: hf.TemperatureLogitsWarper(float(value)),
        "top_k": hf.TopKLogitsWarper,
        "top_p": lambda value: hf.TopPLogitsWarper(float(value)),
        "min_p": lambda value: hf.MinPLogitsWarper(float(value)),
        "typical_p": lambda value: hf.TypicalLogitsWarper(float(value)),
        "epsilon_cutoff": hf.EpsilonLogitsWarper,
        "eta_cutoff": lambda value: hf.EtaLogitsWarper(value, device=device),
        "renormalize_logits": lambda _: hf.LogitNormalization(),
    }
    idle = set() if holds_back else {"min_length", "min_new_tokens", "exponential_decay_length_penalty"}
    if settings.get("min_length", 0) <= width:
        idle.add("min_length")
    return [(name, make(settings[name])) for name, make in makers.items() if name in settings and name not in idle]


def _merge(
    processors: list[tuple[str, Callable[..., torch.Tensor]]], custom: Sequence[Callable[..., torch.Tensor]]
) -> LogitsProcessorList:
    """The user's processors behind the others and before the warpers, each in place of one of its own type."""
    types = {type(processor) for processor in custom}
    warpers = [one for name, one in processors if name in WARPER_FIELDS or name == "renormalize_logits"]
    others = [(name, one) for name, one in processors if one not in warpers]
    type_of = {"min_length": hf.MinLengthLogitsProcessor}
    before = [one for name, one in others if type_of.get(name, type(one)) not in types]
    return LogitsProcessorList([*before, *custom, *warpers])

"""`specdec.generate`: the call that takes the place of `model.generate`.

Arguments, defaults and results follow transformers: keywords win over `generation_config`, which wins over the model's
own; the prompt is part of the returned ids; finished rows are filled up with the pad token.
"""

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from specdec.common.defaults import torch_defaults
from specdec.drafting.base import Drafter
from specdec.generation.host_steps import HostSteps
from specdec.generation.settings import Settings, merge_settings, read_prompts, read_settings
from specdec.loop.decoder import Decoder, DecodeResult, without_autograd
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule, choose_rule
from specdec.loop.stats import AcceptanceStats
from specdec.models.target.target import Target
from specdec.trees.shape import TreeLike
from specdec.tuning.auto import load_drafter

__all__ = ["SpecDecodeOutput", "generate"]

LONG_TEXT = 64
"""New tokens from which on a step is captured for one call alone."""

ENOUGH_STEPS = 64
"""Steps with a proposal that show whether a drafter suits the model."""

KEPT: WeakKeyDictionary[Drafter, Decoder] = WeakKeyDictionary()
"""The decoder of the last call with each drafter that users hold: what it captured and looked up serves the next."""

_LOG = logging.getLogger("specdec")


class SpecDecodeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    `sequences` [B, T + new], `scores` and `logits` (if asked for) and `past_key_values` as transformers returns them,
    and `stats`. With `use_cache=False` there are no `past_key_values`, and nothing is copied for them.
    """

    stats: AcceptanceStats | None = None

    @property
    def lossless(self) -> bool:
        """Whether the sequences are exactly what plain decoding would give: the same tokens, or the same law."""
        return self.stats is not None and self.stats.lossless


@torch_defaults()
def generate(
    model: PreTrainedModel | Target,
    drafter: Drafter | PreTrainedModel | str | os.PathLike[str] | None,
    input_ids: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Callable[..., torch.Tensor]] | None = None,
    stopping_criteria: Sequence[Callable[..., Any]] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    streamer: Any | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    acceptance: str | AcceptanceRule = "auto",
    tree: TreeLike | None = None,
    seed: int | Sequence[int] | torch.Generator | None = None,
    **generation_kwargs: Any,
) -> torch.Tensor | SpecDecodeOutput:
    """Generate text with speculative decoding, exactly as `model.generate` would, only faster.

    Greedy output is that of `model.generate(do_sample=False)` token for token; with `do_sample=True` the output has the
    target's law. Only `acceptance="typical"` gives that up, and the result says so (`lossless`).

    Args:
        model: the target: a decoder-only transformers model.
        drafter: a `Drafter`, a kind that needs no weights (`"prompt_lookup"`, `"lookahead"`, `"none"`), a checkpoint's
            path or hub id, a smaller causal LM of the same vocabulary, or None for plain decoding.
        input_ids: [B, T] int64 prompts.
        attention_mask: [B, T], 1 for tokens and 0 for padding, which may be on the left or on the right. Without a
            mask every token counts, except pad tokens if the pad token does not also end texts (as in transformers).
        generation_config: settings as for `model.generate`.
        logits_processor: transformers' `LogitsProcessor`s. Each is called for every node of the tree with that node's
            own text, without padding, so it must depend on its arguments alone.
        stopping_criteria: transformers' `StoppingCriteria`s, called for one row at a time with every prefix.
        prefix_allowed_tokens_fn: as for `model.generate`.
        streamer: gets the prompt, then each step's tokens, then `end()`; for one row only, as in transformers.
        tokenizer: needed for `stop_strings`.
        acceptance: `"auto"` (greedy, or the lossless sampling rule that suits the drafter), the name of a rule
            (`"greedy"`, `"naive"`, `"rejection"`, `"traversal"`, `"typical"`), or a rule of `specdec.loop.rules`.
        tree: the draft tree: a `TreeShape`, a preset's name, a JSON file, a k_config such as `(4, 2, 2)` or the length
            of a chain. The drafter's own by default; a `Drafter` object already has one.
        seed: of sampling: an int, one int per row, a `torch.Generator`, or None for PyTorch's global one. The same seed
            gives the same text whatever else is in the batch, and with `acceptance="naive"` that of plain decoding,
            whatever the drafter and its tree.
        generation_kwargs: fields of `GenerationConfig`, such as `max_new_tokens`, `do_sample` or `temperature`.

    Returns:
        [B, T + new] int64 ids, prompt included, or a `SpecDecodeOutput` if `return_dict_in_generate` is set.

    Raises:
        TypeError, ValueError: a bad argument, named by the message.
        NotImplementedError: a setting that is not supported (beams, ...), named by the message.
    """
    target = _target_of(model)
    config = merge_settings(target, generation_config, generation_kwargs)
    ids, is_text = read_prompts(input_ids, attention_mask, target, config)
    settings = read_settings(config, ids.shape[1], target.max_positions)
    prompts = [row[mask] for row, mask in zip(ids, is_text, strict=True)]
    _check_callers_code(logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, len(prompts))
    proposer = load_drafter(drafter, target, tree=tree)
    rule = choose_rule(acceptance, proposer, do_sample=bool(config.do_sample))
    processing = Processing(
        config,
        do_sample=bool(config.do_sample),
        prompt_lengths=[len(prompt) for prompt in prompts],
        max_new_tokens=settings.max_new_tokens,
        width=ids.shape[1],
        stop_tokens=settings.stop_tokens,
        custom=logits_processor or (),
        allowed_tokens=prefix_allowed_tokens_fn,
        device=target.device,
        backend=target.backend,
    )
    decoder = _decoder(target, proposer, rule, keep=proposer is drafter, max_new_tokens=settings.max_new_tokens)
    decoder.check_prompts(prompts, settings.max_new_tokens)
    host = HostSteps(
        prompts, config, criteria=[*_stop_strings(config, tokenizer), *(stopping_criteria or ())], streamer=streamer
    )
    host.begin(ids)
    result = decoder.decode(
        prompts,
        settings.max_new_tokens,
        stop_tokens=settings.stop_tokens,
        seed=seed,
        processing=processing,
        **host.arguments(),
        prefill_chunk_size=config.prefill_chunk_size,
        keep_cache=bool(config.return_dict_in_generate) and config.use_cache is not False,
    )
    host.end()
    _warn_if_refused(proposer, result.stats)
    return _output(target, ids, is_text, settings, result, host)


def _target_of(model: PreTrainedModel | Target) -> Target:
    """The model's target as it is now."""
    target = model if isinstance(model, Target) else Target(model)
    target.follow_model()
    return target


def _decoder(target: Target, drafter: Drafter, rule: AcceptanceRule, *, keep: bool, max_new_tokens: int) -> Decoder:
    """A decoder; with `keep`, that of an earlier call with the same objects, and what it captured.

    It lives as long as the drafter. With a drafter that was made for this call alone a step is captured for long texts
    only: that costs as much as a few eager steps, and no later call can use it.
    """
    known = KEPT.get(drafter) if keep else None
    is_known = known is not None and known.acceptance == rule and _is_same(known.target, target)
    if known is not None and is_known and _modules(known.drafter) == _modules(drafter):
        return known
    decoder = Decoder(target, drafter, acceptance=rule, capture=keep or max_new_tokens >= LONG_TEXT)
    if keep:
        KEPT[drafter] = decoder  # which holds a copy of its key, and so is dropped with it
    return decoder


def _modules(drafter: Drafter) -> list[nn.Module]:
    """What a drafter runs: its networks, and what it was bound to."""
    held = [one.model if isinstance(one, Target) else one for one in vars(drafter).values()]
    own = [one for one in held if isinstance(one, nn.Module)]
    return own + [one for member in getattr(drafter, "members", ()) for one in _modules(member)]


def _is_same(one: Target, other: Target) -> bool:
    return one.model is other.model and one.backend == other.backend and one.fused == other.fused


def _check_callers_code(processors: Any, criteria: Any, allowed: Any, streamer: Any, num_prompts: int) -> None:
    """Raise TypeError or ValueError for what could not be called."""
    for name, functions in (("logits_processor", processors), ("stopping_criteria", criteria)):
        if functions is not None and (not isinstance(functions, Sequence) or not all(map(callable, functions))):
            raise TypeError(f"{name}: expected functions, got {functions!r}")
    if allowed is not None and not callable(allowed):
        raise TypeError(f"prefix_allowed_tokens_fn: expected a function, got {allowed!r}")
    if streamer is not None and num_prompts > 1:
        raise ValueError(f"streamer: expected one prompt, as streamers print one text, got {num_prompts}")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer: expected an object with put and end, got {type(streamer).__name__}")


def _stop_strings(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[Any]:
    if not config.stop_strings:
        return []
    if tokenizer is None:
        raise ValueError(
            f"tokenizer: expected the model's tokenizer with stop_strings {config.stop_strings!r}, got None"
        )
    return [StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings)]


def _warn_if_refused(drafter: Drafter, stats: AcceptanceStats) -> None:
    """Say so if hardly anything was accepted: the output is right all the same, only slow."""
    steps = zip(itertools.chain(*stats.num_emitted), itertools.chain(*stats.deepest), strict=True)
    accepted = [emitted > 1 for emitted, deepest in steps if deepest > 0]
    if len(accepted) >= ENOUGH_STEPS and sum(accepted) < 0.02 * len(accepted):
        message = (
            "drafter: %s proposed in %d steps, and something was accepted in %d of them; is it made for this model?"
        )
        _LOG.warning(message, drafter.kind, len(accepted), sum(accepted))


def _output(
    target: Target, ids: torch.Tensor, is_text: torch.Tensor, settings: Settings, result: DecodeResult, host: HostSteps
) -> torch.Tensor | SpecDecodeOutput:
    """The result in transformers' form."""
    width = max(len(tokens) for tokens in result.tokens)
    new = torch.tensor([tokens + [settings.pad_token] * (width - len(tokens)) for tokens in result.tokens])
    sequences = torch.cat((ids, new.to(ids.device)), 1)
    if not settings.config.return_dict_in_generate:
        return sequences
    output = SpecDecodeOutput(
        sequences=sequences, scores=host.scores(settings.pad_token), logits=host.logits(settings.pad_token)
    )
    output.past_key_values = _past_key_values(target, is_text, result, width)
    output.stats = result.stats
    return output


def _past_key_values(target: Target, is_text: torch.Tensor, result: DecodeResult, width: int) -> DynamicCache | None:
    """Keys and values of all returned ids but the last column, as transformers keeps them; zeros at padding.

    None where they were not asked for.
    """
    counts = torch.tensor([len(tokens) for tokens in result.tokens], device=is_text.device)
    cache = result.cache
    if cache is None:
        return None
    if bool((counts < width).any()):  # rows that ended early: their last token was never run
        last = torch.tensor([tokens[-1:] for tokens in result.tokens], device=is_text.device)
        depth = torch.zeros(1, 1, dtype=torch.int32, device=is_text.device)
        with without_autograd(target.device), target.hooked():
            target.score(last, depth, depth[..., None] + 1, cache)
    is_real = torch.cat((is_text, torch.arange(width, device=is_text.device) < counts[:, None]), 1)[:, :-1]
    slots = (is_real.long().cumsum(1) - 1).clamp(min=0)
    past = DynamicCache(config=target.model.config)
    for layer, memory in enumerate(cache.data):
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        keys, values = (side[rows, slots] * is_real[:, :, None, None] for side in memory)  # [B, T, HK, D]
        past.update(keys.transpose(1, 2).clone(), values.transpose(1, 2).clone(), layer)
    return past

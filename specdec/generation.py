"""`specdec.generate`: the call that takes the place of `model.generate`.

Arguments, defaults and results follow transformers: keywords win over `generation_config`, which wins over the model's
own; the prompt is part of the returned ids; finished rows are filled up with the pad token. Whatever this release does
not support is refused by name, never ignored.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.acceptance import AcceptanceStats
from specdec.checkpoints import load_drafter
from specdec.decoder import Decoder
from specdec.drafters.base import Drafter
from specdec.models.target import Target
from specdec.trees import TreeLike

__all__ = ["SpecDecodeOutput", "generate"]

# Fields of GenerationConfig that are used, and those that have no effect on greedy decoding or on what is returned.
_USED_FIELDS = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "do_sample", "return_dict_in_generate"}
_IRRELEVANT_FIELDS = {
    "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache",
    # sampling settings, without effect when do_sample is False
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h",
    # settings of beam search and of transformers' own assisted decoding
    "early_stopping", "length_penalty", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile",
}  # fmt: skip
_DEFAULT_MAX_LENGTH = 20  # as transformers


class SpecDecodeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: `sequences` [B, T + new], and `stats`."""

    stats: AcceptanceStats | None = None

    @property
    def lossless(self) -> bool:
        """Whether the sequences are exactly what plain decoding would give."""
        return self.stats is not None and self.stats.lossless


@dataclass(frozen=True, slots=True)
class _Settings:
    """What one call asks for, after merging keywords, `generation_config` and the model's defaults."""

    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    pad_token: int
    return_dict: bool


def generate(
    model: PreTrainedModel | Target,
    drafter: Drafter | PreTrainedModel | str | os.PathLike[str] | None,
    input_ids: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any | None = None,
    tree: TreeLike | None = None,
    return_dict_in_generate: bool | None = None,
    **generation_kwargs: Any,
) -> torch.Tensor | SpecDecodeOutput:
    """Generate text with speculative decoding; greedy output equals `model.generate(do_sample=False)`.

    Args:
        model: the target: a decoder-only transformers model.
        drafter: a `Drafter`, a kind that needs no weights (`"prompt_lookup"`, `"none"`), a checkpoint's path, a smaller
            causal LM of the same vocabulary, or None for plain decoding.
        input_ids: [B, T] int64 prompts.
        attention_mask: [B, T], 1 for tokens and 0 for padding, which may be on the left or on the right. Without a
            mask every token counts, except pad tokens if the pad token does not also end texts (as in transformers).
        generation_config: settings as for `model.generate`.
        streamer: gets the prompt, then each step's tokens, then `end()`; for one row only, as in transformers.
        tree: the draft tree: a `TreeShape`, a preset's name, a JSON file, a k_config such as `(4, 2, 2)` or the length
            of a chain. The drafter's own by default; a `Drafter` object already has one.
        return_dict_in_generate: return a `SpecDecodeOutput` instead of the ids.
        generation_kwargs: fields of `GenerationConfig`, such as `max_new_tokens` or `eos_token_id`.

    Returns:
        [B, T + new] int64 ids, prompt included, or a `SpecDecodeOutput` with the acceptance statistics.

    Raises:
        TypeError, ValueError: a bad argument, named by the message.
        NotImplementedError: a setting that this release does not support (sampling, beams, logits processors, ...).
    """
    target = model if isinstance(model, Target) else Target(model)
    config = _merge(target, generation_config, return_dict_in_generate, generation_kwargs)
    rows, input_ids = _prompts(input_ids, attention_mask, target, config)
    settings = _settings(config, input_ids.shape[1])
    if streamer is not None and len(rows) > 1:
        raise ValueError(f"streamer: expected one prompt, as streamers print one text, got {len(rows)}")
    decoder = Decoder(target, load_drafter(drafter, target, tree=tree))

    decoder.check_prompts(rows, settings.max_new_tokens)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    result = decoder.decode(
        rows,
        settings.max_new_tokens,
        stop_tokens=settings.stop_tokens,
        on_tokens=None if streamer is None else lambda tokens, _: streamer.put(torch.tensor(tokens)),
    )
    if streamer is not None:
        streamer.end()

    width = max(len(tokens) for tokens in result.tokens)
    new = torch.tensor([tokens + [settings.pad_token] * (width - len(tokens)) for tokens in result.tokens])
    sequences = torch.cat((input_ids, new.to(input_ids.device)), 1)
    if not settings.return_dict:
        return sequences
    output = SpecDecodeOutput(sequences=sequences)
    output.stats = result.stats
    return output


def _prompts(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, target: Target, config: GenerationConfig
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Check the prompts and strip their padding."""
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids: expected a [batch, length] tensor of token ids, got {type(input_ids).__name__}")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids: expected a [batch, length] int64 tensor, got {list(input_ids.shape)} {input_ids.dtype}"
        )
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected at least one prompt of at least one token, got {list(input_ids.shape)}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= target.vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"input_ids: expected token ids from 0 to {target.vocab_size - 1}, got {bad}")
    if attention_mask is None:
        pads = config.pad_token_id is not None and config.pad_token_id not in _ints(config.eos_token_id)
        attention_mask = input_ids != config.pad_token_id if pads else torch.ones_like(input_ids)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask: expected shape {list(input_ids.shape)} as input_ids, got {got}")
    keep = attention_mask.to(input_ids.device).bool()
    empty = (~keep.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"attention_mask: expected at least one token in every row, got only padding in row {empty[0]}"
        )
    for row, mask in enumerate(keep.tolist()):
        first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
        if not all(mask[first : last + 1]):
            raise ValueError(f"attention_mask: expected padding at the ends only, got a gap in row {row}")
    return [row[mask] for row, mask in zip(input_ids, keep, strict=True)], input_ids.long()


def _merge(
    target: Target, generation_config: GenerationConfig | None, return_dict: bool | None, kwargs: dict[str, Any]
) -> GenerationConfig:
    """Merge the settings, keywords first, and refuse what this release does not support."""
    given = generation_config if generation_config is not None else target.model.generation_config
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    for name, value in kwargs.items():
        if name.startswith("_") or not hasattr(config, name) or callable(getattr(config, name)):
            raise ValueError(
                f"{name}: expected an argument of specdec.generate or a GenerationConfig field, got {value!r}"
            )
        setattr(config, name, value)
    if return_dict is not None:
        config.return_dict_in_generate = return_dict
    if config.do_sample:
        raise NotImplementedError(
            "do_sample: expected False, got True (from the call or the model's generation_config); "
            "this release decodes greedily"
        )
    _refuse_unsupported(config)
    return config


def _settings(config: GenerationConfig, width: int) -> _Settings:
    """What the merged settings mean for prompts of padded length `width`."""
    max_new = config.max_new_tokens
    if max_new is None:
        max_length = config.max_length if config.max_length is not None else _DEFAULT_MAX_LENGTH
        max_new = max_length - width
        if max_new < 1:
            raise ValueError(
                f"max_length: expected more than the prompt's {width} tokens, got {max_length}; or pass max_new_tokens"
            )
    if not isinstance(max_new, int) or max_new < 1:
        raise ValueError(f"max_new_tokens: expected an int of at least 1, got {max_new!r}")
    stop_tokens = tuple(_ints(config.eos_token_id))
    pad = config.pad_token_id
    if pad is None:  # as transformers: the first end-of-sequence token; 0 when rows cannot end early
        pad = stop_tokens[0] if stop_tokens else 0
    return _Settings(max_new, stop_tokens, int(pad), bool(config.return_dict_in_generate))


def _refuse_unsupported(config: GenerationConfig) -> None:
    """Raise for every field that differs from its default and that greedy decoding here does not honour."""
    neutral = {"repetition_penalty": 1.0, "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0}
    defaults = GenerationConfig().to_dict()
    for name, value in config.to_dict().items():
        if name in _USED_FIELDS or name in _IRRELEVANT_FIELDS:
            continue
        if value in (None, False, defaults.get(name), neutral.get(name)) or value in ([], {}, 0):
            continue
        raise NotImplementedError(f"{name}: expected its default, got {value!r}; this release does not support it")


def _ints(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    """Token ids given as one, several, a tensor or none."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return [value] if isinstance(value, int) else [int(item) for item in value]

"""What a call of `generate` asks for: keywords, `generation_config` and the model's defaults, merged and checked.

Precedence is transformers': keywords, then the fields that the given config sets, then the model's own. Whatever is not
supported is refused by name, never ignored.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.generation.checks import check_settings, short_repr
from specdec.loop.processing import PROCESSOR_FIELDS, WARPER_FIELDS
from specdec.models.target.target import Target

__all__ = ["Settings", "merge_settings", "read_prompts", "read_settings"]

_USED_FIELDS = {*PROCESSOR_FIELDS, *WARPER_FIELDS} | set(
    "max_length max_new_tokens eos_token_id pad_token_id do_sample return_dict_in_generate max_time stop_strings "
    "output_scores output_logits num_return_sequences prefill_chunk_size".split()
)
# from `early_stopping` on: of beam search, of transformers' own assisted decoding and of its compiled caches
_IRRELEVANT_FIELDS = set(
    "bos_token_id decoder_start_token_id transformers_version use_cache early_stopping length_penalty is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind disable_compile".split()
)
_NEUTRAL_NUMBERS = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
}
"""The one value of a number that is as good as None; 0 and False are not, as transformers acts on them."""
_NEUTRAL_ARGUMENTS: dict[str, tuple[bool | None, ...]] = {
    **dict.fromkeys(("past_key_values", "assistant_model"), (None,)),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask"), (None,)),
    "synced_gpus": (None, False),
    "use_model_defaults": (None, True),
}
"""Arguments of `model.generate` that are not supported here, and the values that ask for nothing."""
_DEFAULT_TOP_K = 50  # as transformers, when sampling; the keyword None turns it off
_UNUSED_WHEN_GREEDY = {
    **dict.fromkeys(("temperature", "top_p", "typical_p"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0),
    "top_k": _DEFAULT_TOP_K,
}
"""What transformers too says nothing about."""
_DEFAULT_NEW_TOKENS = 20  # as transformers, less where the context ends before
_LOG = logging.getLogger("specdec")


@dataclass(frozen=True, slots=True)
class Settings:
    """What one call asks for.

    Attributes:
        config: the merged fields, for the processors.
        max_new_tokens: most tokens that a row may emit.
        stop_tokens: tokens that end a row.
        pad_token: fills up finished rows.
    """

    config: GenerationConfig
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    pad_token: int


def merge_settings(
    target: Target, generation_config: GenerationConfig | None, keywords: Mapping[str, Any]
) -> GenerationConfig:
    """Merge the settings, keywords first, and refuse what is wrong or not supported.

    Raises:
        TypeError: `generation_config` is none.
        ValueError: a keyword that is no field of `GenerationConfig`, or a value that its field cannot take.
        NotImplementedError: a field that is set and not supported.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(generation_config).__name__}")
    config = copy.deepcopy(generation_config) if generation_config is not None else GenerationConfig()
    stored = target.model.generation_config
    _fill(config, stored)
    for name, value in keywords.items():
        if any(value is neutral for neutral in _NEUTRAL_ARGUMENTS.get(name, ())):
            continue
        if name == "assistant_model":
            raise ValueError(f"assistant_model: expected None, got {type(value).__name__}; pass it as drafter")
        if name in _NEUTRAL_ARGUMENTS:
            raise NotImplementedError(
                f"{name}: expected its default, got {short_repr(value)}; specdec does not support it"
            )
        if name.startswith("_") or not hasattr(config, name) or callable(getattr(config, name)):
            raise ValueError(
                f"{name}: expected an argument of specdec.generate or a GenerationConfig field, got {short_repr(value)}"
            )
        setattr(config, name, value)
    defaults = GenerationConfig()
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in _USED_FIELDS or name in _IRRELEVANT_FIELDS:
            continue
        if not hasattr(defaults, name) and hasattr(stored, name):  # the model's own note, which transformers ignores
            continue
        if not _is_neutral(name, value, getattr(defaults, name, None)):
            raise NotImplementedError(
                f"{name}: expected its default, got {short_repr(value)}; specdec does not support it"
            )
    check_settings(config, target.vocab_size)
    if not config.do_sample:
        _warn_of_unused(keywords)
    return config


def _fill(config: GenerationConfig, stored: GenerationConfig | None) -> None:
    """Give the fields that `config` does not set the values that are stored with the model, as transformers does.

    A config that transformers has already filled (that of a `custom_generate` function) stays as it is: what is None
    there was set to None. Entries that are no fields are left behind: transformers does not read them either.
    """
    if hasattr(config, "_eos_token_tensor"):
        return
    for name, value in vars(stored).items() if stored is not None else ():
        if not name.startswith("_") and getattr(config, name, value) is None:
            setattr(config, name, copy.deepcopy(value))
    if config.top_k is None:
        config.top_k = _DEFAULT_TOP_K


def _is_neutral(name: str, value: Any, default: Any) -> bool:
    """Whether a field that is not supported has a value that asks for nothing."""
    if value is None:
        return True
    if name in _NEUTRAL_NUMBERS:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == _NEUTRAL_NUMBERS[name]
    if value is False or (isinstance(value, (list, tuple, dict)) and len(value) == 0):
        return True
    return type(value) is type(default) and bool(value == default)


def _warn_of_unused(keywords: Mapping[str, Any]) -> None:
    """Say which of the caller's keywords do nothing without sampling."""
    given = {name: value for name, value in keywords.items() if name in WARPER_FIELDS and value is not None}
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    defaults = {name for name, value in numbers.items() if value == _UNUSED_WHEN_GREEDY.get(name)}
    unused = [f"{name}={short_repr(value)}" for name, value in given.items() if name not in defaults]
    if unused:
        _LOG.warning("do_sample: expected True with %s, got False; decoding is greedy", ", ".join(unused))


def read_settings(config: GenerationConfig, width: int, max_positions: int | None = None) -> Settings:
    """What the merged settings mean for prompts of padded length `width`.

    Args:
        config: of `merge_settings`. Without a length a row may emit 20 tokens, or as many as fit into the context.
        width: length of the padded prompts.
        max_positions: the model's context.

    Raises:
        ValueError: `max_length` leaves no room behind the prompt.
    """
    max_new = config.max_new_tokens
    if max_new is None:
        if config.max_length is None:
            most = _DEFAULT_NEW_TOKENS if max_positions is None else max_positions - width
            max_new = max(1, min(_DEFAULT_NEW_TOKENS, most))  # without any room the prompt is refused by its length
        else:
            max_new = config.max_length - width
        if max_new < 1:
            raise ValueError(
                f"max_length: expected more than the prompt's {width} tokens, got {config.max_length}; "
                "or pass max_new_tokens"
            )
    stop_tokens = tuple(_ints(config.eos_token_id))
    pad = config.pad_token_id
    if pad is None:  # as transformers: the first end-of-sequence token; 0 when rows cannot end early
        pad = stop_tokens[0] if stop_tokens else 0
    return Settings(config, max_new, stop_tokens, int(pad))


def read_prompts(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, target: Target, config: GenerationConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the prompts.

    Returns:
        [B, T] int64 ids, and [B, T] bool, False at padding; every prompt `num_return_sequences` times.

    Raises:
        TypeError, ValueError: no ids, ids out of range, an empty prompt, a mask that does not fit.
    """
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
    is_text = attention_mask.to(input_ids.device).bool()
    empty = (~is_text.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"attention_mask: expected at least one token in every row, got only padding in row {empty[0]}"
        )
    for row, mask in enumerate(is_text.tolist()):
        first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
        if not all(mask[first : last + 1]):
            raise ValueError(f"attention_mask: expected padding at the ends only, got a gap in row {row}")
    copies = config.num_return_sequences or 1
    if copies > 1 and not config.do_sample:
        raise ValueError(f"num_return_sequences: expected 1 without sampling, as all would be equal, got {copies}")
    return input_ids.long().repeat_interleave(copies, 0), is_text.repeat_interleave(copies, 0)


def _ints(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    """Token ids given as one, several, a tensor or none."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return [value] if isinstance(value, int) else [int(item) for item in value]

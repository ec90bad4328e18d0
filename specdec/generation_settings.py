"""What a call of `generate` asks for: keywords, `generation_config` and the model's defaults, merged and checked.

Precedence is transformers': keywords, then the given config, then the model's own. Whatever is not supported is refused
by name, never ignored.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.models.target import Target
from specdec.processing import PROCESSOR_FIELDS, WARPER_FIELDS
from specdec.setting_checks import check_settings

__all__ = ["Settings", "merge_settings", "read_prompts", "read_settings"]

_USED_FIELDS = (
    {
        "max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "do_sample", "return_dict_in_generate",
        "max_time", "stop_strings", "output_scores", "output_logits", "num_return_sequences",
    }
    | PROCESSOR_FIELDS
    | WARPER_FIELDS
)  # fmt: skip
_IRRELEVANT_FIELDS = {
    "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    # settings of beam search, of transformers' own assisted decoding and of its compiled caches
    "early_stopping", "length_penalty", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile",
}  # fmt: skip
_DEFAULT_MAX_LENGTH = 20  # as transformers


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
    given = generation_config if generation_config is not None else target.model.generation_config
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    for name, value in keywords.items():
        if name.startswith("_") or not hasattr(config, name) or callable(getattr(config, name)):
            raise ValueError(
                f"{name}: expected an argument of specdec.generate or a GenerationConfig field, got {value!r}"
            )
        setattr(config, name, value)
    neutral = {
        "num_beams": 1,
        "num_beam_groups": 1,
        "guidance_scale": 1,
        "encoder_repetition_penalty": 1.0,
        "diversity_penalty": 0.0,
    }
    defaults = GenerationConfig().to_dict()
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in _USED_FIELDS or name in _IRRELEVANT_FIELDS:
            continue
        if value in (None, False, defaults.get(name), neutral.get(name)) or value in ([], {}, 0):
            continue
        raise NotImplementedError(f"{name}: expected its default, got {value!r}; specdec does not support it")
    check_settings(config, target.vocab_size)
    return config


def read_settings(config: GenerationConfig, width: int) -> Settings:
    """What the merged settings mean for prompts of padded length `width`.

    Raises:
        ValueError: `max_length` leaves no room behind the prompt.
    """
    max_new = config.max_new_tokens
    if max_new is None:
        max_length = config.max_length if config.max_length is not None else _DEFAULT_MAX_LENGTH
        max_new = max_length - width
        if max_new < 1:
            raise ValueError(
                f"max_length: expected more than the prompt's {width} tokens, got {max_length}; or pass max_new_tokens"
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
    copies = config.num_return_sequences or 1
    if copies > 1 and not config.do_sample:
        raise ValueError(f"num_return_sequences: expected 1 without sampling, as all would be equal, got {copies}")
    return input_ids.long().repeat_interleave(copies, 0), keep.repeat_interleave(copies, 0)


def _ints(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    """Token ids given as one, several, a tensor or none."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return [value] if isinstance(value, int) else [int(item) for item in value]

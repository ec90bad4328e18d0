"""Which values each setting of `generate` may take; any other is refused by name before anything runs."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

__all__ = ["check_settings", "short_repr"]

_LONGEST_REPR = 80


def short_repr(value: Any) -> str:
    """`repr` on one line and of at most 80 characters, for messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_REPR else text[: _LONGEST_REPR - 3] + "..."


def check_settings(config: GenerationConfig, vocab_size: int) -> None:
    """Check all settings that act on the call; None means that a setting was not given.

    Raises:
        ValueError: a value out of range or of another type; the message begins with the setting's name.
    """
    checks = _checks(vocab_size)
    if config.do_sample:
        checks |= _SAMPLING
    for name, (expected, is_valid) in checks.items():
        value = getattr(config, name, None)
        if value is not None and not is_valid(value):
            raise ValueError(f"{name}: expected {expected}, got {short_repr(value)}")


def _is_int(value: Any, low: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    return isinstance(value, (list, tuple)) and all(map(is_item, value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _is_cutoff(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


_SAMPLING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number over 0", _is_positive),
    "top_k": ("an int of at least 0", lambda value: _is_int(value, 0)),
    "top_p": ("a number over 0 and at most 1", _is_share),
    "min_p": ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "typical_p": ("a number over 0 and at most 1", _is_share),
    "epsilon_cutoff": ("a number from 0 to below 1", _is_cutoff),
    "eta_cutoff": ("a number from 0 to below 1", _is_cutoff),
}


def _checks(vocab_size: int) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Of the settings that act with and without sampling."""
    ids = f"token ids from 0 to {vocab_size - 1}"

    def is_token(value: Any) -> bool:
        return _is_int(value, 0) and value < vocab_size

    def is_word(value: Any) -> bool:
        return _is_list(value, is_token) and len(value) > 0

    def is_biased_word(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == 2 and is_word(value[0]) and _is_number(value[1])

    def is_bias(value: Any) -> bool:
        pairs = list(value.items()) if isinstance(value, dict) else value
        return bool(pairs) and _is_list(pairs, is_biased_word)

    several = (f"a list of {ids}", lambda value: _is_list(value, is_token))
    tokens = (ids, lambda value: is_token(value) or _is_list(value, is_token))
    return {
        "max_new_tokens": ("an int of at least 1", lambda value: _is_int(value, 1)),
        "max_length": ("an int", _is_int),
        "max_time": ("a number of seconds over 0", _is_positive),
        "num_return_sequences": ("an int of at least 1", lambda value: _is_int(value, 1)),
        "prefill_chunk_size": ("an int of at least 1", lambda value: _is_int(value, 1)),
        "eos_token_id": ("an int or several", lambda value: _is_int(value) or _is_list(value, _is_int)),
        "pad_token_id": ("an int", _is_int),
        "stop_strings": (
            "a string or a list of strings",
            lambda value: isinstance(value, str) or _is_list(value, lambda item: isinstance(item, str)),
        ),
        "repetition_penalty": ("a number over 0", _is_positive),
        "no_repeat_ngram_size": ("an int of at least 0", lambda value: _is_int(value, 0)),
        "min_length": ("an int of at least 0", lambda value: _is_int(value, 0)),
        "min_new_tokens": ("an int of at least 0", lambda value: _is_int(value, 0)),
        "forced_bos_token_id": (f"one of the {ids}", is_token),
        "forced_eos_token_id": tokens,
        "suppress_tokens": several,
        "begin_suppress_tokens": several,
        "bad_words_ids": (f"lists of {ids}", lambda value: _is_list(value, is_word) and len(value) > 0),
        "sequence_bias": (f"a number for each of some tuples of {ids}", is_bias),
        "exponential_decay_length_penalty": (
            "a start and a factor",
            lambda value: _is_list(value, _is_number) and len(value) == 2,
        ),
    }

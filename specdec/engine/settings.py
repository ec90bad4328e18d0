"""What a request may ask for: settings of `generate` that are data of a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.common.checks import check_at_least
from specdec.common.randomness import row_seeds
from specdec.generation.settings import merge_settings, read_settings
from specdec.kernels.sample_probs import WarpSettings
from specdec.loop.processing import warp_settings
from specdec.models.target.target import Target

__all__ = ["MOST_LOGPROBS", "RequestSettings", "check_prompt", "read_request"]

MOST_LOGPROBS = 20
"""Most alternatives of a token that can be asked for."""

_NOT_BY_REQUEST = {
    "max_time": "timeout",
    "output_scores": "logprobs",
    "output_logits": "logprobs",
    "prefill_chunk_size": "the engine's prefill_tokens",
    "num_return_sequences": "several requests",
}
"""Settings of `generate` that requests do not have, and what takes their place."""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What one request asks for, checked.

    Attributes:
        max_new_tokens: most tokens it may emit.
        is_greedy: whether the most probable tokens are taken.
        warp: what is done to its logits.
        seed: of its random numbers.
        stop_tokens: tokens that end it.
        stop_strings: texts that end it.
        timeout: seconds after which it ends with what it has; None for no limit.
        logprobs: how many alternatives of every token to tell; None for no log-probabilities.
    """

    max_new_tokens: int
    is_greedy: bool
    warp: WarpSettings
    seed: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    timeout: float | None = None
    logprobs: int | None = None

    @property
    def reads_logits(self) -> bool:
        """Whether its tokens depend on more than which one is the most probable."""
        return not self.is_greedy or self.warp != WarpSettings()

    def row(self) -> torch.Tensor:
        """[5] float32, what `DecodeState.settings` has of its row."""
        warp = self.warp
        if self.is_greedy:
            warp = WarpSettings(top_k=1, repetition_penalty=warp.repetition_penalty)
        return warp.on("cpu")[0]


def read_request(
    target: Target,
    prompt_length: int,
    max_length: int,
    keywords: Mapping[str, Any],
    *,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    logprobs: int | None = None,
) -> RequestSettings:
    """Merge and check the settings of a request.

    Args:
        target: the target, whose own configuration is what nobody overrides.
        prompt_length: tokens of the prompt.
        max_length: most tokens of a request.
        keywords: of `generate`.
        generation_config: below the keywords.
        seed: of sampling; a random one by default.
        timeout: as `RequestSettings`.
        logprobs: as `RequestSettings`.

    Raises:
        TypeError, ValueError: a bad value, or more tokens than fit; the message names the setting.
        NotImplementedError: a setting that requests cannot have.
    """
    config = merge_settings(target, generation_config, keywords)
    for name, instead in _NOT_BY_REQUEST.items():
        if getattr(config, name, None) not in (None, False, 1):
            raise NotImplementedError(
                f"{name}: expected its default in an engine, got {getattr(config, name)!r}; there is {instead}"
            )
    settings = read_settings(config, prompt_length, max_length)
    if prompt_length + settings.max_new_tokens > max_length:
        raise ValueError(
            f"max_new_tokens: expected at most {max_length - prompt_length} after a prompt of {prompt_length} tokens "
            f"(the engine's max_length is {max_length}), got {settings.max_new_tokens}"
        )
    is_greedy = not config.do_sample
    check_at_least(0, {"seed": seed, "logprobs": logprobs})
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        raise ValueError(f"logprobs: expected at most {MOST_LOGPROBS} alternatives, got {logprobs}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout: expected seconds over 0, got {timeout}")
    strings = config.stop_strings or ()
    return RequestSettings(
        max_new_tokens=settings.max_new_tokens,
        is_greedy=is_greedy,
        warp=warp_settings(config, do_sample=not is_greedy),
        seed=0 if is_greedy else int(row_seeds(seed, 1)),
        stop_tokens=frozenset(settings.stop_tokens),
        stop_strings=(strings,) if isinstance(strings, str) else tuple(strings),
        timeout=timeout,
        logprobs=logprobs,
    )


def check_prompt(prompt: Sequence[int] | torch.Tensor, vocab_size: int, max_length: int) -> list[int]:
    """The token ids of a prompt.

    Raises:
        TypeError: no token ids.
        ValueError: none of them, too many, or ids out of range.
    """
    if isinstance(prompt, torch.Tensor):
        if prompt.is_floating_point() or prompt.dtype == torch.bool or prompt.ndim != 1:
            raise TypeError(f"prompt: expected a 1-D tensor of token ids, got {list(prompt.shape)} {prompt.dtype}")
        prompt = prompt.tolist()
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt: expected token ids, got {type(prompt).__name__}")
    bad = [one for one in prompt if not isinstance(one, int) or isinstance(one, bool)]
    if bad:
        raise TypeError(f"prompt: expected token ids, got {bad[0]!r}")
    if not 1 <= len(prompt) < max_length:
        raise ValueError(
            f"prompt: expected 1 to {max_length - 1} tokens (the engine's max_length is {max_length}), "
            f"got {len(prompt)}"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise ValueError(f"prompt: expected token ids from 0 to {vocab_size - 1}, got {wrong}")
    return list(prompt)

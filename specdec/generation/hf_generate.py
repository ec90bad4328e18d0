"""`specdec.hf_generate`: what `model.generate(..., custom_generate=specdec.hf_generate)` calls.

transformers has done its own preparations by then, and this module takes them back: it has repeated the prompts,
dropped a mask of ones, and put the processors and criteria that it makes from the settings into one list with the
caller's. What it made is recognised by making it once more with the model's own methods; `specdec.generate` makes it
anew, per node.
"""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
)

from specdec.drafting.base import Drafter
from specdec.generation.generate import SpecDecodeOutput, generate
from specdec.loop.rules import AcceptanceRule
from specdec.trees.shape import TreeLike

__all__ = ["hf_generate"]

_NOT_TAKEN = {
    "inputs_embeds": "pass input_ids",
    "assistant_model": "pass it as drafter",
    "streamer": "pass it as spec_streamer",
    "tokenizer": "pass it as spec_tokenizer",
}
_HOLD_BACK_STOPS = ("min_new_tokens", "min_length", "bad_words_ids", "exponential_decay_length_penalty")


def hf_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Callable[..., torch.Tensor]] | None = None,
    stopping_criteria: Sequence[Callable[..., Any]] | None = None,
    generation_config: GenerationConfig | None = None,
    drafter: Drafter | PreTrainedModel | str | os.PathLike[str] | None = None,
    acceptance: str | AcceptanceRule = "auto",
    tree: TreeLike | None = None,
    seed: int | Sequence[int] | torch.Generator | None = None,
    spec_streamer: Any | None = None,
    spec_tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | SpecDecodeOutput:
    """For `model.generate(..., custom_generate=specdec.hf_generate, drafter=...)`; arguments as of `generate`.

    transformers hands `streamer`, `tokenizer` and `assistant_model` on to its own methods only: a streamer is passed as
    `spec_streamer`, stop strings as a `StopStringCriteria`, an assistant as `drafter`.

    Raises:
        NotImplementedError: an argument of `model.generate` that is not supported, named by the message.
    """
    config = copy.deepcopy(generation_config if generation_config is not None else model.generation_config)
    mask = model_kwargs.get("attention_mask")
    if mask is None:  # transformers drops a mask of ones
        mask = torch.ones_like(input_ids)
    _check_model_kwargs(model_kwargs, input_ids, mask)
    processors, allowed = _unwrap_allowed(_own_processors(model, config, input_ids, logits_processor, model_kwargs))
    criteria = _own_criteria(model, config, stopping_criteria, spec_tokenizer)
    criteria = _take_over(criteria, config, input_ids.shape[1])
    config.num_return_sequences = 1  # the prompts are repeated already
    return generate(
        model,
        drafter,
        input_ids,
        attention_mask=mask,
        generation_config=config,
        logits_processor=processors,
        stopping_criteria=criteria,
        prefix_allowed_tokens_fn=allowed,
        streamer=spec_streamer,
        tokenizer=spec_tokenizer,
        acceptance=acceptance,
        tree=tree,
        seed=seed,
    )


def _check_model_kwargs(given: dict[str, Any], input_ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise NotImplementedError for what would change the text if it were obeyed."""
    for name, advice in _NOT_TAKEN.items():
        if given.get(name) is not None:
            raise NotImplementedError(
                f"{name}: expected None with custom_generate=specdec.hf_generate, got {type(given[name]).__name__}; "
                f"{advice}"
            )
    positions = given.get("position_ids")  # transformers passes some even if the caller does not
    if positions is not None and not _are_counted(positions, input_ids, mask):
        raise NotImplementedError(
            f"position_ids: expected the positions that the attention_mask gives, got {positions.tolist()}; "
            "specdec does not support others"
        )
    past = given.get("past_key_values")
    if past is not None:
        length = int(past.get_seq_length()) if hasattr(past, "get_seq_length") else len(past)
        if length > 0:
            raise NotImplementedError(
                f"past_key_values: expected an empty cache, got one of length {length}; specdec runs the whole prompt"
            )


def _are_counted(positions: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether every token's position is the number of tokens before it."""
    if positions.ndim != 2 or positions.shape[1] != input_ids.shape[1] or mask.shape != input_ids.shape:
        return False
    keep = mask.to(positions.device).bool()
    counted = keep.long().cumsum(1) - 1
    if positions.shape[0] != keep.shape[0]:  # one row for all, perhaps repeated with the prompts
        positions = positions[:1] if bool((positions == positions[:1]).all()) else positions.new_full((1, 1), -1)
    return bool(((positions == counted) | ~keep).all())


def _own_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    input_ids: torch.Tensor,
    processors: Sequence[Callable[..., torch.Tensor]] | None,
    model_kwargs: dict[str, Any],
) -> list[Callable[..., torch.Tensor]]:
    """The caller's processors: the list without those that transformers made from the settings.

    Its order: each made one, or the caller's first of the same type in its place; the caller's others; then the
    warpers, which transformers adds in any case.
    """
    if not processors or not hasattr(config, "_eos_token_tensor"):  # else not prepared by `model.generate`
        return list(processors or ())
    greedy = copy.deepcopy(config)
    greedy.do_sample, greedy.renormalize_logits, greedy.watermarking_config = False, None, None
    all_made, made = (
        model._get_logits_processor(
            generation_config=settings,
            input_ids_seq_length=input_ids.shape[1],
            encoder_input_ids=input_ids,
            logits_processor=[],
            device=input_ids.device,
            model_kwargs=model_kwargs,
        )
        for settings in (config, greedy)
    )
    num_warpers = len(all_made) - len(made)
    return _without(list(processors)[: len(processors) - num_warpers], made)


def _own_criteria(
    model: PreTrainedModel,
    config: GenerationConfig,
    criteria: Sequence[Callable[..., Any]] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Callable[..., Any]]:
    """The caller's criteria: the list without those that transformers made from the settings."""
    if not criteria or not hasattr(config, "_eos_token_tensor"):
        return list(criteria or ())
    made = model._get_stopping_criteria(generation_config=config, stopping_criteria=[], tokenizer=tokenizer)
    return _without(criteria, made)


def _without(given: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """`given` without what was made: of each type either the one that was made is in there, or only the caller's."""
    alike = [(one, [_values(other) for other in given if type(other) is type(one)]) for one in made]
    types = {type(one) for one, found in alike if found == [_values(one)]}
    return [one for one in given if type(one) not in types]


def _values(item: object) -> dict[str, Any]:
    """The attributes of a processor or criterion, as values that compare; but not when it was made."""
    values = {name: value for name, value in vars(item).items() if name != "initial_timestamp"}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _unwrap_allowed(
    processors: list[Callable[..., torch.Tensor]],
) -> tuple[list[Callable[..., torch.Tensor]], Callable[[int, torch.Tensor], list[int]] | None]:
    """The other processors, and the `prefix_allowed_tokens_fn` of the constrained ones, which count the rows."""
    constrained = [one for one in processors if isinstance(one, PrefixConstrainedLogitsProcessor)]
    if not constrained:
        return processors, None

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        asked = [list(one._prefix_allowed_tokens_fn(row // one._num_beams, text)) for one in constrained]
        return [token for token in asked[0] if all(token in tokens for tokens in asked[1:])]

    return [one for one in processors if one not in constrained], allowed


def _take_over(criteria: list[Any], config: GenerationConfig, width: int) -> list[Any]:
    """Let the caller's criteria take the place of the settings of their kind, as in transformers.

    Lengths count the padding there, so a `MaxLengthCriteria` becomes `max_new_tokens`.

    Returns:
        The criteria that stay.
    """
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    if lengths:
        if config.forced_eos_token_id is not None:
            raise NotImplementedError(
                "stopping_criteria: expected no MaxLengthCriteria beside forced_eos_token_id, "
                f"got one of {min(lengths)}; pass max_length"
            )
        config.max_new_tokens = max(1, min(lengths) - width)
    if any(type(one) is MaxTimeCriteria for one in criteria):
        config.max_time = None
    stops = [token for one in criteria if type(one) is EosTokenCriteria for token in one.eos_token_id.tolist()]
    if stops:
        held_back = [name for name in _HOLD_BACK_STOPS if getattr(config, name, None)]
        if held_back:
            raise NotImplementedError(
                f"stopping_criteria: expected no EosTokenCriteria beside {held_back[0]}, got one of {stops}; "
                "pass eos_token_id"
            )
        if config.pad_token_id is None and getattr(config, "_pad_token_tensor", None) is not None:
            config.pad_token_id = int(config._pad_token_tensor)
        config.eos_token_id = stops
    return [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]

"""What a text must look like, said by transformers' forward pass and processors, one position after the other."""

import copy

import torch
from transformers import GenerationConfig

from lib.fuzz_calls import Call
from lib.law_drafters import build_target

MARGIN = 1e-4  # two scores closer than this may change places between passes of other shapes


def ends_at(call: Call, prompt: list[int], tokens: list[int]) -> int:
    """After how many of the tokens the text must end."""
    if call.get("max_time", 1000) < 1:
        return 1
    criteria = call.make().get("stopping_criteria", [])
    for count, token in enumerate(tokens, 1):
        text = torch.tensor([prompt + tokens[:count]])
        if token in call.stops or any(bool(one(text, None).any()) for one in criteria):
            return count
    return call.max_new_tokens


def check_row(call: Call, row: int, tokens: list[int], full) -> None:
    """Compare a row's tokens, scores, logits and cache with those of the target alone."""
    prompt = call.prompts[row // call.copies]
    text = torch.tensor([prompt + tokens])
    with torch.no_grad():
        output = build_target()(text, use_cache=True)
    processors = _processors(call, len(prompt))
    for step, token in enumerate(tokens):
        end = len(prompt) + step
        logits = output.logits[:, end - 1]
        scores = processors(text[:, :end], logits.clone())[0]
        where = f"token {step} of row {row}"
        _check_close(full.logits[step][row], logits[0], f"logits of {where}")
        _check_close(full.scores[step][row], scores, f"scores of {where}", tolerance=2e-3)
        _check_token(call, scores, token, where)
    _check_cache(call, row, tokens, output.past_key_values, full)


def _check_close(got: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = MARGIN) -> None:
    assert torch.allclose(got, expected, atol=tolerance, rtol=tolerance), (
        f"{what}: {got.tolist()}, not {expected.tolist()}"
    )


def _check_token(call: Call, scores: torch.Tensor, token: int, where: str) -> None:
    """The token is the most probable one, a possible one, or a typical one, as the rule says."""
    assert scores[token] > -torch.inf, f"{where}: {token} has probability 0"
    is_best = bool(scores[token] >= scores.max() - MARGIN)
    if call.rule == "greedy":
        assert is_best, f"{where}: {token} is not the most probable one of {scores.tolist()}"
    if call.rule == "typical" and not call.draws and not is_best:
        probs = scores.softmax(-1)
        entropy = -(probs * probs.clamp(min=1e-30).log()).sum()
        rule = call.arguments["acceptance"]
        threshold, alpha = (0.09, 0.3) if isinstance(rule, str) else (rule.threshold, rule.alpha)
        bound = min(threshold, alpha * float(torch.exp(-entropy)))
        assert probs[token] > bound - MARGIN, f"{where}: {token} of probability {probs[token]:.3g} is below {bound:.3g}"


def _processors(call: Call, length: int):
    """transformers' own list for one prompt of this length, without padding."""
    arguments = call.make()
    config = copy.deepcopy(arguments.get("generation_config") or GenerationConfig())
    for name, value in arguments.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.max_length = length + call.max_new_tokens
    if config.min_new_tokens is not None:  # transformers lets it win
        config.min_length = None
    if config.min_length is not None:
        config.min_length -= call.width - length  # it counts the padding
    if config.do_sample and config.top_k is None:
        config.top_k = 50
    config.num_beams = 1
    config._eos_token_tensor = torch.tensor(call.stops) if call.stops else None
    return build_target()._get_logits_processor(
        config,
        input_ids_seq_length=length,
        prefix_allowed_tokens_fn=arguments.get("prefix_allowed_tokens_fn"),
        logits_processor=arguments.get("logits_processor"),
        device="cpu",
    )


def _check_cache(call: Call, row: int, tokens: list[int], expected, full) -> None:
    """The returned keys and values are those of the row's text, in its places."""
    mask = call.arguments.get("attention_mask")
    keep = torch.ones(call.width) if mask is None else mask[row // call.copies]
    new = torch.arange(full.sequences.shape[1] - call.width) < len(tokens)
    is_real = torch.cat((keep.bool(), new))[:-1]  # the last column has not been run
    for got, want in zip(full.past_key_values.layers, expected.layers, strict=True):
        for name in ("keys", "values"):
            ours = getattr(got, name)[row][:, is_real]
            _check_close(ours, getattr(want, name)[0][:, : ours.shape[1]], f"{name} of row {row}")

"""Random calls of `specdec.generate`: only documented errors, no token lost or repeated, the model as it was.

`make fuzz` runs them all. Every call is made from its seed alone; `FUZZ_ARGS="--first-seed 123 --num-calls 1"` repeats
the one of seed 123.
"""

import argparse
import re
import sys
from collections import Counter
from contextlib import nullcontext
from functools import lru_cache, partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

import specdec
from lib.fuzz_calls import Call, make_call
from lib.fuzz_flaws import Countdown, Flaw, Interrupt
from lib.fuzz_reference import check_row, ends_at
from lib.host_code import KeepingStreamer
from lib.law_drafters import LEARNING, build_target
from specdec.common.randomness import row_seeds
from specdec.loop.rules import RULES

NUM_CALLS = 10_000
PROMPT = torch.tensor([[2, 4, 1, 2, 4, 3]])
# the style of every error: the argument, a colon, and what was wrong with it
MESSAGE = re.compile(r"^\w+: .*(expected|needs|contradicts)", re.DOTALL)


class FuzzError(AssertionError):
    """A call that did not do what it should have done; the message has its seed and all its arguments."""


def run_call(seed: int) -> str:
    """Run the call of one seed and check all that it does.

    Returns:
        What came of it: "success", or the name of the documented error.

    Raises:
        FuzzError: something that must not happen.
    """
    call = make_call(seed)
    model = build_target()
    model.train(call.training)
    try:
        before = _state(model)
        inputs = {name: value.clone() for name, value in _tensors(call.arguments).items()}
        outcome = _run(call, model)
        _check_state(model, before)
        for name, value in inputs.items():
            assert torch.equal(call.arguments[name], value), f"{name} was changed"
        if outcome != "success":
            plain = specdec.generate(model, None, PROMPT, max_new_tokens=4)
            assert torch.equal(plain, _expected_plain()), "a plain call after the error gives other tokens"
    except Exception as error:
        raise FuzzError(f"{type(error).__name__}: {error}\n{call}") from error
    finally:
        model.eval()
    return outcome


def _run(call: Call, model) -> str:
    arguments = call.make()
    interrupt = Interrupt(call.interrupt_at)
    error = None
    try:
        with interrupt if call.interrupt_at else nullcontext():
            output = _generate(model, call, arguments)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    planted = next((one for one in [interrupt, *_callers_code(arguments)] if one.has_raised), None)
    if planted:
        assert type(error) is planted.error, f"the caller's {planted.error.__name__} became {error!r}"
    elif call.flaw:
        _check_error(error, call.flaw)
    elif error is not None:
        raise error
    else:
        _check_output(call, model, arguments, output)
    return "success" if error is None else type(error).__name__


def _generate(model, call: Call, arguments):
    torch.manual_seed(call.global_seed)
    return specdec.generate(model, **arguments)


def _tensors(arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def _callers_code(arguments) -> list[Countdown]:
    """Code of the caller that may have raised an error."""
    values = [one for value in arguments.values() for one in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, Countdown)]


def _check_error(error: BaseException | None, flaw: Flaw) -> None:
    assert error is not None, f"no error for {flaw}"
    if not isinstance(error, flaw.types):
        raise error
    assert str(error).startswith(f"{flaw.name}: "), f"expected an error about {flaw.name}, got {error!r}"
    assert MESSAGE.match(str(error)), f"an error without style: {error!r}"


def _state(model) -> dict:
    return {
        "attention": model.config._attn_implementation,
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "settings": model.generation_config.to_dict(),
        "weights": {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]},
    }


def _check_state(model, before: dict) -> None:
    after = _state(model)
    for name in ("attention", "training", "hooks", "settings"):
        assert after[name] == before[name], f"the model's {name} changed"
    assert after["weights"].keys() == before["weights"].keys(), "the model has other weights"
    for name, value in after["weights"].items():
        assert torch.equal(value, before["weights"][name]), f"the model's {name} changed"
    assert not any(value.is_inference() for value in [*model.parameters(), *model.buffers()]), (
        "weights became inference tensors"
    )
    assert torch.is_grad_enabled(), "gradients stayed off"


@lru_cache
def _expected_plain() -> torch.Tensor:
    return build_target().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4)


def _check_output(call: Call, model, arguments, output) -> None:
    """All that a result says must hold for the target alone, and be said again by the same call."""
    full = _generate(model, call, call.make(return_dict_in_generate=True, output_scores=True, output_logits=True))
    wants_ids = not call.get("return_dict_in_generate")
    assert isinstance(output, torch.Tensor) == wants_ids, f"got {type(output).__name__}"
    assert torch.equal(output if wants_ids else output.sequences, full.sequences), "the same seed gives other tokens"
    if not wants_ids:
        if call.kind not in LEARNING:
            assert output.stats.num_emitted == full.stats.num_emitted, "the same seed gives other steps"
        for name in ("scores", "logits"):
            kept = getattr(output, name)
            assert (kept is not None) == bool(call.get(f"output_{name}")), f"{name} or none"
            same = partial(torch.allclose, atol=1e-4) if call.kind in LEARNING else torch.equal
            assert kept is None or all(map(same, kept, getattr(full, name))), f"other {name} the second time"
    tokens = _check_rows(call, full)
    _check_stats(call, full)
    if isinstance(arguments.get("streamer"), KeepingStreamer):
        arguments["streamer"].check(full.sequences[0].tolist())
    _check_plain(call, model, full)
    if len(tokens) > 1:
        _check_one_row_alone(call, model, tokens)


def _check_rows(call: Call, full) -> list[list[int]]:
    """Prompts, ends, padding and tokens; returns every row's new tokens."""
    sequences, width = full.sequences, call.width
    assert sequences.dtype == torch.int64
    prompts = call.arguments["input_ids"].long().repeat_interleave(call.copies, 0)
    assert torch.equal(sequences[:, :width], prompts), "the prompts changed"
    counts = [1 + sum(row) for row in full.stats.num_emitted]  # the first token is no step's
    assert len(counts) == len(sequences)
    assert max(counts) == sequences.shape[1] - width == len(full.scores) == len(full.logits)
    pad_token = call.get("pad_token_id", call.stops[0] if call.stops else 0)
    tokens = []
    for row, count in enumerate(counts):
        new = sequences[row, width:].tolist()
        assert new[count:] == [pad_token] * (len(new) - count), f"row {row} is not padded by {pad_token}: {new}"
        tokens.append(new[:count])
        expected = ends_at(call, call.prompts[row // call.copies], tokens[row])
        assert count == expected, f"row {row} ends after {count} tokens, not after {expected}: {new}"
        check_row(call, row, tokens[row], full)
    return tokens


def _check_stats(call: Call, full) -> None:
    stats = full.stats
    for emitted, deepest in zip(stats.num_emitted, stats.deepest, strict=True):
        for count, depth in zip(emitted, deepest, strict=True):
            assert 1 <= count <= depth + 1, f"{count} tokens of a tree of depth {depth}"
    assert stats.num_target_passes == max(map(len, stats.num_emitted))
    assert full.lossless == stats.lossless == RULES[call.rule].lossless
    assert full.past_key_values.get_seq_length() == full.sequences.shape[1] - 1


def _check_plain(call: Call, model, full) -> None:
    """Plain decoding gives the same tokens."""
    if call.rule == "greedy" and call.kind != "none":
        plain = _generate(model, call, call.make(drafter=None, tree=None, streamer=None, return_dict_in_generate=False))
        assert torch.equal(plain, full.sequences), f"plain decoding gives {plain.tolist()}, not {full.sequences}"


def _check_one_row_alone(call: Call, model, tokens: list[list[int]]) -> None:
    """A row gets the same tokens without its companions."""
    torch.manual_seed(call.global_seed)  # a seed of None is drawn from it
    arguments = call.make(num_return_sequences=None, return_dict_in_generate=False)
    row = call.seed % len(tokens)
    seed = arguments.get("seed")
    if seed is None and not call.draws:
        seed = 0  # as the call itself
    arguments["seed"] = [int(row_seeds(seed, len(tokens))[row]) % 2**64]
    place = row // call.copies
    arguments |= {name: value[place : place + 1] for name, value in _tensors(arguments).items()}
    new = _generate(model, call, arguments)[0, call.width :].tolist()
    assert new == tokens[row], f"row {row} alone gives {new}, with the others {tokens[row]}"


def main() -> int:
    """Run many calls; the first that fails is printed with its seed."""
    parser = argparse.ArgumentParser(description="Random calls of specdec.generate.")
    parser.add_argument("--num-calls", type=int, default=NUM_CALLS, help="default: %(default)s")
    parser.add_argument("--first-seed", type=int, default=0, help="calls have consecutive seeds (default: %(default)s)")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    console, outcomes = Console(soft_wrap=True), Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("calls", total=options.num_calls)
        for seed in range(options.first_seed, options.first_seed + options.num_calls):
            try:
                outcomes[run_call(seed)] += 1
            except FuzzError as error:
                repeat = f'To repeat it: make fuzz FUZZ_ARGS="--first-seed {seed} --num-calls 1"'
                console.print(f"\n{error}\n{repeat}", markup=False, highlight=False)
                return 1
            progress.advance(task)
    console.print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

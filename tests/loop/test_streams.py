"""Code of the caller's rides on the captured step, which gives the pieces and the results of the eager loop."""

import io
import re

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import specdec
from lib.guard import Guard
from lib.host_code import EndsAt, KeepingStreamer
from lib.law_drafters import DRAFTERS, VOCAB_SIZE, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels
from lib.tensors import assert_near
from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.commands.cli import main
from specdec.drafters.load import load_drafter
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Room
from specdec.loop.captured import LAG
from specdec.loop.decoder import Decoder
from specdec.loop.follower import Follower
from specdec.loop.rules import choose_rule
from specdec.loop.step import NonFiniteLogitsError
from specdec.models.target.target import Target

pytestmark = pytest.mark.interpreter

LENGTHS = {"one row": [5], "three rows": [3, 9, 1]}


def two_decoders(kind, monkeypatch, *, sampling=False):
    """One that runs eagerly and one that replays."""
    rule = choose_rule("auto", make_drafter(kind), do_sample=sampling)
    eager = Decoder(build_target(), make_drafter(kind), acceptance=rule)
    references_as_kernels(monkeypatch)
    target = Target(build_target(), backend="triton")
    return eager, Decoder(target, make_drafter(kind), acceptance=rule, capture=Recorder())


class Cutting:
    """An `on_step` that keeps what it is told and ends each row at a token of its own."""

    def __init__(self, limits):
        self.limits = limits
        self.counts = [0] * len(limits)
        self.pieces = []

    def __call__(self, report):
        assert report.output is None
        assert not torch.is_inference_mode_enabled()
        self.pieces.append(report.new)
        kept = {}
        for row, new in enumerate(report.new):
            before, self.counts[row] = self.counts[row], self.counts[row] + len(new)
            if before < self.limits[row] <= self.counts[row]:
                kept[row] = self.limits[row] - before
        return kept


def run(decoder, prompts, limits, **settings):
    code = Cutting(limits)
    return decoder.decode(prompts, 14, on_step=code, reads_logits=False, keep_cache=True, **settings), code.pieces


def same(result, expected):
    assert result.stats.captured
    assert not expected.stats.captured
    assert result.tokens == expected.tokens
    if expected.stats.plan is not None and any(step.cost_ms for step in expected.stats.plan.steps):
        return  # steps were chosen by what they took
    assert result.stats.num_emitted == expected.stats.num_emitted
    assert result.stats.deepest == expected.stats.deepest
    assert result.stats.num_target_passes == expected.stats.num_target_passes
    assert torch.equal(result.cache.lengths, expected.cache.lengths)
    for row, length in enumerate(result.cache.lengths.tolist()):
        ours, theirs = (one.cache.data[:, :, row, :length] for one in (result, expected))
        assert_near(ours, theirs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_pieces_and_results_are_those_of_the_eager_loop(kind, sampling, lengths, generator, monkeypatch):
    eager, replayed = two_decoders(kind, monkeypatch, sampling=sampling)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    graphs = replayed.captured.graphs
    for limits in ([99, 99, 99], [6, 99, 3], [1, 2, 99], [2, 5, 9], [1, 1, 1]):
        limits, graphs.num_replays = limits[: len(lengths)], 0
        (expected, told), (result, pieces) = (run(one, prompts, limits, seed=5) for one in (eager, replayed))
        same(result, expected)
        if kind == "union, sized":  # whose steps are others
            continue
        assert pieces[: len(told)] == told
        assert graphs.num_replays <= result.stats.num_target_passes + LAG
        assert len(pieces) == len(told) == 1 + result.stats.num_target_passes
    assert graphs.num_recorded == eager.drafter.num_ways


def test_what_follows_a_cut_row_is_the_same_as_without_it(generator, monkeypatch):
    _, decoder = two_decoders("draft_tree", monkeypatch, sampling=True)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (3, 9, 1)]
    whole, _ = run(decoder, prompts, [99, 99, 99], seed=5)
    cut, _ = run(decoder, prompts, [4, 99, 1], seed=5)
    assert cut.tokens == [whole.tokens[0][:4], whole.tokens[1], whole.tokens[2][:1]]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_row_may_keep_not_even_its_first_token(kind, generator, monkeypatch):
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (3, 9)]
    for decoder in two_decoders(kind, monkeypatch):
        whole = decoder.decode(prompts, 14)
        limits = [{0: 0}]
        cut = decoder.decode(
            prompts, 14, on_step=lambda _, left=limits: left.pop() if left else None, reads_logits=False
        )
        assert cut.tokens == [[], whole.tokens[1]]
        assert cut.stats.num_emitted[0] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_error_in_the_callers_code_leaves_everything_as_it_was(call, error, generator, monkeypatch):
    _, decoder = two_decoders("medusa", monkeypatch)
    model = decoder.target.model
    before = (model.config._attn_implementation, [len(module._forward_hooks) for module in model.modules()])
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in (3, 9)]
    expected, told = run(decoder, prompts, [99, 99])
    told_now = []

    def breaks(report):
        told_now.append(report.new)
        if len(told_now) == call:
            raise error

    with pytest.raises(error):
        decoder.decode(prompts, 14, on_step=breaks, reads_logits=False)
    assert told_now == told[:call]
    assert (model.config._attn_implementation, [len(module._forward_hooks) for module in model.modules()]) == before
    result, pieces = run(decoder, prompts, [99, 99])
    assert (result.tokens, pieces) == (expected.tokens, told)
    assert decoder.captured.graphs.num_recorded == 1


def test_nan_is_an_error_that_names_the_step_and_frees_the_memory(generator, monkeypatch):
    _, decoder = two_decoders("none", monkeypatch)
    weight = decoder.target.model.get_output_embeddings().weight.data
    kept = weight.clone()
    told = []

    def poison(report):
        told.append(report)
        if len(told) == 3:  # of step 2; step 3 was sent by then
            weight[3, 0] = torch.nan

    with pytest.raises(NonFiniteLogitsError, match=f"got NaN at step {3 + LAG}"):
        decoder.decode([torch.tensor([1, 2])], 12, on_step=poison, reads_logits=False)
    assert len(told) == 3 + LAG
    assert decoder.captured.memories() == []
    weight.copy_(kept)


def test_nan_in_a_surplus_replay_frees_the_memory_and_is_no_error(monkeypatch):
    eager, decoder = two_decoders("none", monkeypatch)
    prompts = [torch.tensor([1, 2])]
    expected, _ = run(eager, prompts, [5])
    weight = decoder.target.model.get_output_embeddings().weight.data
    kept, code = weight.clone(), Cutting([5])

    def poison(report):
        if sum(code.counts) + len(report.new[0]) == 4:  # all replays that the text needs were sent
            weight[3, 0] = torch.nan
        return code(report)

    assert decoder.decode(prompts, 14, on_step=poison, reads_logits=False).tokens == expected.tokens
    assert decoder.captured.memories() == []
    weight.copy_(kept)


def test_neither_the_message_nor_an_end_waits_for_the_device(monkeypatch):
    decoder = Decoder(build_target(), make_drafter("draft_tree"))
    state = decoder._new_state(Room(3, 40, 10, 20), torch.device("cpu"))
    follower = Follower(state, NoDrafter(), 2, lambda report: None)
    guard = Guard()
    with pytest.MonkeyPatch.context() as patch:
        guard.forbid(patch)
        with guard:
            assert follower.message().shape == (follower.message_size,)
            state.cut(1, 3, 2)
            state.cut(0, 1, 0)
    assert guard.num_checked > 10


class Ends(StoppingCriteria):
    """Ends rows at different times, by their last token and length."""

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        return (input_ids[:, -1] % 3 == 1) & torch.tensor(input_ids.shape[1] > 11)


def capturing(monkeypatch):
    """Let `generate` replay recorded steps."""
    recorder = Recorder()
    references_as_kernels(monkeypatch)

    def decoder(*args, capture, **kwargs):
        return Decoder(*args, capture=recorder if capture else False, **kwargs)

    monkeypatch.setattr("specdec.generation.generate.Decoder", decoder)
    return recorder


@pytest.mark.parametrize("do_sample", [False, True])
def test_generate_with_streamers_criteria_and_stop_strings(do_sample, monkeypatch):
    model, tokenizer = load_tiny()
    ids = tokenizer("def add(a, b):\n    return", return_tensors="pt").input_ids
    cases = [
        lambda: {"streamer": KeepingStreamer()},
        lambda: {"stop_strings": ["self", ")"], "tokenizer": tokenizer, "streamer": KeepingStreamer()},
        lambda: {"stopping_criteria": StoppingCriteriaList([EndsAt(ids.shape[1] + 7)])},
        lambda: {"max_time": 1000.0},
        lambda: {"max_time": 1e-9},
        lambda: {"stopping_criteria": [Ends()], "input_ids": ids.repeat(3, 1)},
        lambda: {"output_scores": True, "streamer": KeepingStreamer()},
    ]
    settings = {"max_new_tokens": 24, "do_sample": do_sample, "seed": 3, "return_dict_in_generate": True}

    def outputs(target):
        drafter = load_drafter(tiny_drafter("medusa"), target)
        for case in cases:
            code = {"input_ids": ids, **case()}
            output = specdec.generate(target, drafter, code.pop("input_ids"), **settings, **code)
            pieces = code["streamer"].received if "streamer" in code else None
            yield output, pieces, getattr(code.get("stopping_criteria", [None])[0], "seen", None)

    expected = list(outputs(Target(model)))
    recorder = capturing(monkeypatch)
    for case, (output, *told), (plain, *told_plain) in zip(
        cases, outputs(Target(model, backend="triton")), expected, strict=True
    ):
        assert torch.equal(output.sequences, plain.sequences)
        assert told == told_plain
        assert output.stats.num_emitted == plain.stats.num_emitted
        assert output.stats.captured == ("output_scores" not in case())
        assert output.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    assert recorder.num_recorded == 2  # for one row and for three


def test_the_commands_ride_on_the_captured_step_too(monkeypatch, tmp_path, capsys):
    options = ["--model", "tiny", "--drafter", "medusa", "--max-new-tokens", "16"]
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}# {{ message.content }}\n{% endfor %}")
    commands = {
        "generate": ["generate", *options, "--prompt", "def f("],
        "chat": ["chat", *options, "--chat-template", str(template)],
    }

    def shown(command):
        monkeypatch.setattr("sys.stdin", io.StringIO("a queue\nand a stack\n"))
        assert main(commands[command]) == 0
        words = " ".join(capsys.readouterr().out.split())  # the terminal's lines end somewhere else
        return re.sub(r"\d+ tok/s(; a step captured in [0-9.]+ s)?", "", words)

    expected = {command: shown(command) for command in commands}
    recorder = capturing(monkeypatch)
    monkeypatch.setenv("SPECDEC_BACKEND", "triton")
    for command in commands:
        recorder.num_replays = 0
        assert shown(command) == expected[command]
        assert recorder.num_replays > 4

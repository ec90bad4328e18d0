"""A step that was recorded once and is replayed gives what the eager loop gives."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

import specdec
from lib.families import build_model
from lib.guard import GuardedEngine
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.recorder import Recorder, references_as_kernels, storages
from lib.replays import same, some_prompts, two_decoders
from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.drafters.load import load_drafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.generation.generate import KEPT
from specdec.loop.captured import LAG, MAX_RECORDINGS, batch_bucket, length_bucket
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import CannotCaptureError
from specdec.loop.memory import num_bytes, tensors_of
from specdec.loop.processing import Processing
from specdec.loop.rules import choose_rule
from specdec.loop.step import NonFiniteLogitsError
from specdec.models.target.target import Target

pytestmark = pytest.mark.interpreter

LENGTHS = {"one row": [5], "three rows": [3, 9, 1]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_replaying_a_recorded_step_gives_the_text_of_the_eager_loop(kind, sampling, lengths, generator, monkeypatch):
    rule = choose_rule("auto", make_drafter(kind), do_sample=sampling)
    eager, replayed = two_decoders(kind, rule, monkeypatch)
    settings = {"stop_tokens": [2], "seed": 5}
    for max_new_tokens in (14, 9):  # one recording serves both
        prompts = some_prompts(generator, lengths)
        same(*(decoder.decode(prompts, max_new_tokens, **settings) for decoder in (replayed, eager)))
    assert replayed.captured.graphs.num_recorded == eager.drafter.num_ways


@pytest.mark.parametrize("drafter", ["hydra++", "eagle", "eagle3", "parallelspec_medusa", "falcon"])
def test_bundled_drafters_replay(drafter, monkeypatch):
    model, tokenizer = load_tiny()
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in ("class Queue:", "import os\n\ndef f(")]
    plain = Target(model)
    expected = Decoder(plain, load_drafter(tiny_drafter(drafter), plain)).decode(prompts, 12)
    references_as_kernels(monkeypatch)
    target = Target(model, backend="triton")
    decoder = Decoder(target, load_drafter(tiny_drafter(drafter), target), capture=Recorder())
    same(decoder.decode(prompts, 12), expected)
    assert expected.stats.tau > 1.1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_surplus_replays_change_nothing_that_is_reported(kind, generator, monkeypatch):
    rule = choose_rule("auto", make_drafter(kind), do_sample=True)
    _, decoder = two_decoders(kind, rule, monkeypatch)
    result = decoder.decode(some_prompts(generator, [6, 2, 4, 3, 5]), 15, stop_tokens=[2], seed=1)
    state = decoder.captured.memories()[0].state
    lengths = state.cache.lengths.tolist()
    committed = [state.cache.data[:, :, row, :length].clone() for row, length in enumerate(lengths)]
    ends = state.cache.data.clone()
    with torch.inference_mode():
        for _ in range(6):
            decoder.captured.graphs.recordings[0].replay()
    assert state.tokens(5) == result.tokens
    assert state.counts(5) == (result.stats.num_emitted, result.stats.deepest, result.stats.num_target_passes)
    assert state.cache.lengths.tolist() == lengths
    for row, length in enumerate(lengths):
        assert torch.equal(state.cache.data[:, :, row, :length], committed[row])
        end = length + decoder.drafter.shape.num_nodes
        assert torch.equal(state.cache.data[:, :, row, end:], ends[:, :, row, end:])
    assert state.progress.tolist() == [0, -1]


def test_a_row_that_is_as_long_as_the_memory_stays_inside(generator, monkeypatch):
    eager, decoder = two_decoders("draft_tree", None, monkeypatch)
    prompts = some_prompts(generator, [40, 3])
    same(decoder.decode(prompts, 24), eager.decode(prompts, 24))  # to the last position of the context
    state = decoder.captured.memories()[0].state
    assert state.room.max_length == 64
    assert int(state.cache.lengths.max()) + decoder.drafter.shape.num_nodes <= state.cache.capacity


def test_the_host_stops_soon_after_the_last_row(generator, monkeypatch):
    _, decoder = two_decoders("none", None, monkeypatch)
    prompts = some_prompts(generator, [5])
    text = decoder.decode(prompts, 40).tokens[0]
    assert decoder.captured.graphs.num_replays == 39
    for stop in set(text):
        decoder.captured.graphs.num_replays = 0
        result = decoder.decode(prompts, 40, stop_tokens=[stop])
        num_steps = text.index(stop)
        assert result.stats.num_target_passes == num_steps
        assert decoder.captured.graphs.num_replays <= min(num_steps + max(LAG, 1) + 1, 39)


def test_sizes_are_rounded_up_to_buckets():
    assert [batch_bucket(size) for size in (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert [length_bucket(n, 4096) for n in (2, 256, 257, 2049, 4000, 4096)] == [256, 256, 512, 2560, 4096, 4096]
    assert length_bucket(60, 64) == 64
    for size in range(1, 200):
        assert size <= batch_bucket(size) <= 1.5 * size
    for length in range(2, 9000, 7):
        assert length <= length_bucket(length, 10**6) <= max(length + 256, 1.25 * length)


def test_recordings_are_shared_by_what_fits_and_released_on_demand(generator, monkeypatch):
    _, decoder = two_decoders("medusa", None, monkeypatch)
    graphs = decoder.captured.graphs
    prompts = some_prompts(generator, [5, 3])
    assert decoder.warmup(batch_size=2, max_length=20)
    decoder.decode(prompts, 10)
    decoder.decode(prompts[:1] * 2, 4)
    assert graphs.num_recorded == 1
    decoder.decode(prompts, 10, stop_tokens=[1])
    decoder.decode(prompts, 10, stop_tokens=[2])
    assert graphs.num_recorded == 2  # another number of stop tokens, not other ones
    decoder.decode(prompts[:1], 10)
    assert graphs.num_recorded == 3
    assert sorted(memory.state.room.batch_size for memory in decoder.captured.memories()) == [1, 2]
    assert "captured: 2 for 2 x 64 tokens" in str(decoder.describe())
    for num_stop_tokens in range(20):
        assert decoder.warmup(batch_size=2, max_length=16, num_stop_tokens=num_stop_tokens)
    assert f"captured: {MAX_RECORDINGS} for 2 x 64 tokens" in str(decoder.describe())
    decoder.release()
    assert decoder.captured.memories() == []
    assert len(decoder.decode(prompts, 10).tokens[0]) == 10


def test_longer_texts_get_a_larger_memory_in_place_of_the_smaller(generator):
    decoder = Decoder(build_model("llama"), capture=GuardedEngine(), backend="reference")
    decoder.captured.graphs.record = lambda step: None
    decoder.captured._max_positions = 100
    decoder.warmup(max_length=90)
    decoder.captured._max_positions = 256
    decoder.warmup(max_length=80)
    assert [memory.state.room.max_length for memory in decoder.captured.memories()] == [100]
    decoder.warmup(max_length=101)
    assert [memory.state.room.max_length for memory in decoder.captured.memories()] == [256]


def test_code_on_the_host_gets_the_eager_loop(generator, monkeypatch):
    _, decoder = two_decoders("medusa", None, monkeypatch)
    prompts = some_prompts(generator, [5])
    assert not decoder.decode(prompts, 6, on_step=lambda report: None).stats.captured
    config = GenerationConfig(no_repeat_ngram_size=3)
    custom = Processing(config, do_sample=False, prompt_lengths=[5], max_new_tokens=6, width=5)
    assert not decoder.decode(prompts, 6, processing=custom).stats.captured
    assert not decoder.decode(prompts, 1).stats.captured
    assert decoder.captured.graphs.num_recorded == 0
    assert decoder.decode(prompts, 6).stats.captured


class _Refuses:
    def __init__(self, error):
        self.error, self.asked = error, 0

    def record(self, step):
        self.asked += 1
        step()
        raise self.error


def test_a_model_that_cannot_be_captured_runs_eagerly_with_one_line(generator, caplog):
    graphs = _Refuses(CannotCaptureError("called a synchronizing CUDA operation"))
    decoder = Decoder(build_target(), make_drafter("medusa"), capture=graphs)
    prompts = some_prompts(generator, [5, 2])
    with caplog.at_level(logging.INFO, logger="specdec"):
        results = [decoder.decode(prompts, 9) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "the step of this model cannot be captured, so that it runs eagerly: called a synchronizing CUDA operation"
    ]
    assert graphs.asked == 1
    assert not results[1].stats.captured
    assert results[1].tokens == Decoder(build_target()).decode(prompts, 9).tokens
    assert "steps run eagerly" in str(decoder.describe())
    assert not decoder.warmup(max_length=20)


class _Forgetful(PromptLookup):
    """Keeps its text in an attribute that it binds anew, as any drafter might."""

    def commit(self, verdict, output):
        super().commit(verdict, output)
        self._texts = copy.copy(self._texts)
        self._texts.lengths = self._texts.lengths.clone()


class _Counts(PromptLookup):
    num_drafts = 0

    def draft(self, root, choose):
        self.num_drafts += 1
        return super().draft(root, choose)


@pytest.mark.parametrize("drafter", [_Forgetful, _Counts])
def test_a_drafter_whose_state_a_replay_would_not_find_runs_eagerly(drafter, generator, caplog):
    decoder = Decoder(build_target(), drafter(num_draft_tokens=3), capture=Recorder())
    prompts = some_prompts(generator, [5, 2])
    result = decoder.decode(prompts, 12)
    assert not result.stats.captured
    assert result.tokens == Decoder(build_target()).decode(prompts, 12).tokens
    assert "binds its state anew" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_lack_of_memory_says_how_much_is_needed_and_leaves_the_model_as_it_was(error, generator):
    model = build_model("llama")
    before = (model.config._attn_implementation, [len(module._forward_hooks) for module in model.modules()])
    decoder = Decoder(model, capture=_Refuses(error("CUDA out of memory")))
    match = r"memory: expected .* GiB on cpu .*, got CUDA out of memory; lower max_new_tokens, the batch"
    with pytest.raises(error, match=match):
        decoder.decode(some_prompts(generator, [5]), 9)
    after = (model.config._attn_implementation, [len(module._forward_hooks) for module in model.modules()])
    assert before == after
    assert decoder.captured.memories() == []


def test_another_error_of_the_device_is_no_lack_of_memory(generator):
    decoder = Decoder(build_model("llama"), capture=_Refuses(torch.AcceleratorError("CUDA error: misaligned address")))
    with pytest.raises(torch.AcceleratorError, match="^CUDA error: misaligned address"):
        decoder.decode(some_prompts(generator, [5]), 9)


@pytest.mark.parametrize("are_written", [True, False])
def test_nan_logits_in_a_replayed_step_are_an_error_that_names_the_step(are_written, generator, monkeypatch):
    _, decoder = two_decoders("none", None, monkeypatch)
    prompts = some_prompts(generator, [5])
    head = decoder.target.model.get_output_embeddings()
    factor = torch.ones(())
    if are_written:
        head.register_forward_hook(lambda module, args, out: out * factor)
    else:
        factor = head.weight.data[3, 0]
    before = factor.clone()
    expected = decoder.decode(prompts, 12).tokens
    graphs = decoder.captured.graphs
    reader = graphs.reader

    def poisoned_from_step_4(depth, size):
        inner = reader(depth, size)
        push, graphs.num_replays = inner.push, 0

        def poison(value):
            push(value)
            if graphs.num_replays == 3:
                factor.fill_(float("nan"))

        inner.push = poison
        return inner

    monkeypatch.setattr(graphs, "reader", poisoned_from_step_4)
    with pytest.raises(NonFiniteLogitsError, match="got NaN at step 4"):
        decoder.decode(prompts, 12)
    assert decoder.captured.memories() == [], "the memory holds NaN"
    factor.copy_(before)
    monkeypatch.setattr(graphs, "reader", reader)
    assert decoder.decode(prompts, 12).tokens == expected


@pytest.mark.parametrize("moved", ["target", "drafter"])
def test_what_moved_is_captured_anew(moved, generator, monkeypatch):
    _, decoder = two_decoders("medusa", None, monkeypatch)
    prompts = some_prompts(generator, [5])
    decoder.decode(prompts, 4)
    owner = decoder.target.model.model.norm if moved == "target" else decoder.drafter.network
    weight = next(owner.parameters())
    kept = weight.data
    weight.data = kept.clone()
    decoder.decode(prompts, 4)
    weight.data = kept
    assert decoder.captured.graphs.num_recorded == 2


def test_the_cache_of_a_result_is_its_own(generator, monkeypatch):
    eager, decoder = two_decoders("draft_tree", None, monkeypatch)
    prompts = some_prompts(generator, [5, 2, 8, 3, 1])
    result, expected = decoder.decode(prompts, 10, keep_cache=True), eager.decode(prompts, 10, keep_cache=True)
    decoder.decode(some_prompts(generator, [9] * 5), 12)
    assert torch.equal(result.cache.lengths, expected.cache.lengths)
    for row, length in enumerate(result.cache.lengths.tolist()):
        torch.testing.assert_close(result.cache.data[:, :, row, :length], expected.cache.data[:, :, row, :length])
    assert decoder.decode(prompts, 10).cache is eager.decode(prompts, 10).cache is None


def test_a_decoder_that_nobody_holds_gives_its_memory_back_at_once(monkeypatch):
    """Not when garbage is collected: that may be far off, and in the midst of another capture."""
    decoder = Decoder(build_model("llama"), capture=GuardedEngine(), backend="reference")
    decoder.captured.graphs.record = lambda step: None
    decoder.warmup(max_length=20)
    state = decoder.captured.memories()[0].state
    kept = weakref.ref(state.cache.data)
    del state
    gc.disable()
    try:
        del decoder
        assert kept() is None
    finally:
        gc.enable()


def test_a_single_token_takes_a_captured_step_that_is_there_and_captures_none(generator, monkeypatch):
    _, decoder = two_decoders("medusa", None, monkeypatch)
    prompts = some_prompts(generator, [5])
    assert not decoder.decode(prompts, 1).stats.captured
    decoder.warmup(max_length=20)
    result = decoder.decode(prompts, 1)
    assert result.stats.captured
    assert len(result.tokens[0]) == 1
    assert decoder.captured.graphs.num_recorded == 1


@pytest.mark.parametrize("kind", [*DRAFTERS])
def test_the_plan_is_what_is_allocated(kind, monkeypatch):
    """Counted twice: by the plan on the meta device, and by watching which storages come to stay."""
    _, decoder = two_decoders(kind, None, monkeypatch)
    plan = decoder.describe(batch_size=3, max_length=30).plan
    with Allocations() as allocations:
        memory = decoder.lay_out(plan.room, decoder.target.device)
    assert plan.static_bytes == allocations.live_bytes()
    state = memory.state
    assert plan.cache_bytes == num_bytes(tensors_of(state.cache))
    assert plan.state_bytes == num_bytes(tensors_of(state)) - plan.cache_bytes
    parameters = {id(p): p for p in decoder.target.model.parameters()}
    buffers = decoder.target.model.buffers()
    assert plan.weights_bytes == num_bytes(tensors_of([*parameters.values(), *buffers]))
    assert plan.total_bytes == plan.weights_bytes + plan.drafter_bytes + plan.static_bytes
    assert f"{plan.total_bytes / 2**20:.2f} MiB" in str(plan)


def test_generate_keeps_what_was_captured_with_the_drafter(generator, monkeypatch):
    recorder = Recorder()

    def decoder(*args, capture, **kwargs):
        return Decoder(*args, capture=recorder if capture else False, **kwargs)

    expected = specdec.generate(build_target(), None, torch.tensor([[1, 2, 3]]), max_new_tokens=9)
    references_as_kernels(monkeypatch)
    monkeypatch.setattr("specdec.generation.generate.Decoder", decoder)
    target, drafter = Target(build_target(), backend="triton"), make_drafter("medusa")
    for model in (target, Target(build_target(), backend="triton")):
        assert torch.equal(specdec.generate(model, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=9), expected)
    assert recorder.num_recorded == 1
    sampled = [
        specdec.generate(target, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=9, do_sample=True, seed=1)
        for _ in range(2)
    ]
    assert torch.equal(*sampled)
    assert recorder.num_recorded == 2
    specdec.generate(target, "lookahead", torch.tensor([[1, 2, 3]]), max_new_tokens=9)
    assert recorder.num_recorded == 2, "a drafter of one call alone captures nothing"
    kept = weakref.ref(KEPT[drafter])
    del drafter
    gc.collect()
    assert kept() is None, "a decoder lives as long as the drafter that it is kept by"


class Allocations(TorchDispatchMode):
    """The storages that were made while it was active."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = storages((args, kwargs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        return out

    def live_bytes(self):
        gc.collect()
        alive = [reference() for reference in self.storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)

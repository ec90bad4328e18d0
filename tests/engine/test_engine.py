"""Requests come and go; each emits what it would alone, for every drafter, greedily and sampled."""

import math
import threading
import time

import pytest
import torch

import specdec
from lib.engine_requests import PATIENCE, alone, requests
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from specdec.common.randomness import Uniforms
from specdec.drafters.union.union import Union
from specdec.engine.pool import RowPool
from specdec.engine.requests import EngineClosedError, QueueFullError, RequestFailedError
from specdec.engine.settings import RequestSettings
from specdec.kernels.sample_probs import WarpSettings
from specdec.loop.processing import Processing
from specdec.loop.rules import Naive
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target


def an_engine(model, drafter=None, **settings):
    return specdec.Engine(model, drafter, **{"max_rows": 5, "tree": None, **settings})


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_request_emits_what_it_would_alone(kind):
    """Prompts are read in chunks of a few tokens, rows are refilled, memories grow and shrink."""
    model = build_target()
    with an_engine(model, make_drafter(kind), prefill_tokens=12) as engine:
        handles = [engine.submit(prompt, max_new_tokens=count) for prompt, count in requests()]
        results = [handle.result(PATIENCE) for handle in handles]
    assert [one.tokens for one in results] == [alone(model, prompt, count) for prompt, count in requests()]
    assert {one.finish_reason for one in results} == {"length"}
    for one in results:
        assert sum(one.stats.num_emitted[0]) == len(one.tokens) - 1
        assert 0 <= one.queue_ms <= one.first_token_ms <= one.total_ms


@pytest.mark.parametrize("kind", ["none", "suffix", "medusa", "eagle", "draft_tree", "union", "union, sized"])
def test_sampled_texts_are_those_of_their_seeds_beside_greedy_ones(kind):
    model = build_target()
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.1}
    cases = [(*one, {"seed": number, **sampling} if number % 3 else {}) for number, one in enumerate(requests())]
    cases[3] = (*cases[3][:2], {"repetition_penalty": 1.5})
    with an_engine(model, make_drafter(kind)) as engine:
        handles = [engine.submit(prompt, max_new_tokens=count, **settings) for prompt, count, settings in cases]
        tokens = [handle.result(PATIENCE).tokens for handle in handles]
    for (prompt, count, settings), text in zip(cases, tokens, strict=True):
        rule = {"acceptance": "naive"} if "seed" in settings else {}
        assert text == alone(model, prompt, count, **settings, **rule)


def test_of_equally_probable_tokens_a_greedy_row_takes_the_lowest():
    """Beside sampled rows all are drawn, greedy ones among the most probable tokens alone and with the number 0."""
    target = Target(build_target())
    processing, seeds = Processing.by_rows(target), torch.tensor([5, 5])
    logits = torch.tensor([0.5, -1.0, 3.0, 2.9, 3.0, 3.0, 0.0]).expand(2, 1, 7)
    settings = torch.stack(
        [RequestSettings(9, is_greedy, WarpSettings(), 5, frozenset()).row() for is_greedy in (1, 0)]
    )
    uniforms = Uniforms(seeds, num_positions=4)
    uniforms.fill_positions(is_greedy=torch.tensor([True, False]))
    nothing = torch.full((2, 3), -1, dtype=torch.int32), torch.tensor([9, 9])
    scores = Scores.of(processing(logits, None, *nothing, settings))
    assert Naive().first(scores, uniforms).tolist()[0] == 2
    assert uniforms.at(torch.zeros(1, 1, dtype=torch.int32))[1] > 0


def test_tokens_come_as_they_are_emitted_and_the_end_token_ends():
    model = build_target()
    prompt, text = next((p, t) for p, _ in requests() if len(set((t := alone(model, p, 24))[:12])) > 2)
    end = text[11]
    expected = text[: text.index(end) + 1]
    told = []
    with an_engine(model, make_drafter("medusa")) as engine:
        handle = engine.submit(
            prompt, max_new_tokens=24, eos_token_id=end, on_progress=lambda one: told.append(one.is_done)
        )
        pieces = list(handle)
        assert [token for piece in pieces for token in piece] == expected
        result = handle.result(PATIENCE)
    assert result.tokens == expected
    assert result.finish_reason == "stop"
    assert told.count(True) == 1
    assert told[-1] is True
    assert handle.take() == []


def test_an_engine_may_end_all_texts_at_tokens_of_its_own():
    model = build_target()
    prompt = requests()[2][0]
    text = alone(model, prompt, 24)
    with an_engine(model, stop_tokens=[text[5]]) as engine:
        assert engine.submit(prompt, max_new_tokens=24, eos_token_id=text[5]).result(PATIENCE).finish_reason == "stop"
        with pytest.raises(ValueError, match=f"eos_token_id: expected \\[{text[5]}\\], which end every text here"):
            engine.submit(prompt, max_new_tokens=24)


def test_stop_strings_end_a_text_with_the_token_that_completes_them():
    model, tokenizer = specdec.load_tiny()
    prompt = tokenizer("Once upon a time").input_ids
    text = alone(model, prompt, 60)
    string = tokenizer.decode(text)[20:27]
    with specdec.Engine(model, "tiny/medusa", tokenizer=tokenizer, max_rows=2, max_length=200) as engine:
        result = engine.submit(prompt, max_new_tokens=60, stop_strings=["nowhere to be found", string]).result(PATIENCE)
        assert result.finish_reason == "stop"
        assert result.stop_string == string
        assert result.tokens == text[: len(result.tokens)]
        assert string in tokenizer.decode(result.tokens)
        assert string not in tokenizer.decode(result.tokens[:-1])
    with an_engine(model) as engine, pytest.raises(ValueError, match="tokenizer: expected one with stop_strings"):
        engine.submit(prompt, stop_strings="x")


@pytest.mark.parametrize("kind", ["none", "medusa", "union"])
def test_log_probabilities_are_the_models(kind):
    model = build_target()
    with an_engine(model, make_drafter(kind)) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=count, logprobs=None if number % 3 == 1 else number % 3)
            for number, (prompt, count) in enumerate(requests())
        ]
        results = [handle.result(PATIENCE) for handle in handles]
    for number, ((prompt, count), result) in enumerate(zip(requests(), results, strict=True)):
        assert result.tokens == alone(model, prompt, count)
        if number % 3 == 1:
            assert result.logprobs is None
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.tokens])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        assert [one.token for one in result.logprobs] == result.tokens
        own = torch.tensor([one.logprob for one in result.logprobs])
        torch.testing.assert_close(own, logps.gather(1, torch.tensor(result.tokens)[:, None])[:, 0], atol=1e-4, rtol=0)
        assert [len(one.top) for one in result.logprobs] == [number % 3] * count
        if number % 3:
            assert [one.top[0][0] for one in result.logprobs] == logps.argmax(-1).tolist()


def test_requests_are_cancelled_and_run_out_of_time_in_rows_and_in_the_queue():
    model, tokenizer = specdec.load_tiny()
    prompt = tokenizer("Once upon a time").input_ids
    long = {"max_new_tokens": 400, "eos_token_id": None}
    with an_engine(model, max_rows=1, stop_tokens=(), max_length=512) as engine:
        running, waiting = engine.submit(prompt, **long), engine.submit(prompt, timeout=0.05, **long)
        first = next(iter(running))
        late = waiting.result(PATIENCE)
        assert (late.finish_reason, late.tokens) == ("timeout", [])
        assert math.isnan(late.first_token_ms)
        running.cancel()
        result = running.result(PATIENCE)
        assert result.finish_reason == "cancelled"
        assert result.tokens[: len(first)] == first
        assert result.tokens == alone(model, prompt, len(result.tokens))
        assert sum(result.stats.num_emitted[0]) == len(result.tokens) - 1
        timed = engine.submit(prompt, timeout=0.2, **long).result(PATIENCE)
        assert timed.finish_reason == "timeout"
        assert 0 < len(timed.tokens) < 400
        # the row serves others
        assert engine.submit(prompt, max_new_tokens=9).result(PATIENCE).tokens == alone(model, prompt, 9)
        assert engine.stats().num_finished == {"timeout": 2, "cancelled": 1, "length": 1}


def test_a_full_queue_and_a_closed_engine_say_so():
    model, tokenizer = specdec.load_tiny()
    prompt = tokenizer("Once upon a time").input_ids
    engine = an_engine(model, max_rows=1, max_queue=2, max_length=256, stop_tokens=())
    handles = [engine.submit(prompt, max_new_tokens=100, eos_token_id=None)]
    next(iter(handles[0]))
    handles += [engine.submit(prompt, max_new_tokens=5) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_queue: expected at most 2 requests that wait") as error:
        engine.submit(prompt)
    assert error.value.retry_after >= 1
    assert engine.stats().num_waiting == 2
    engine.close()
    assert [handle.result(0).finish_reason for handle in handles] == ["length"] * 3
    with pytest.raises(EngineClosedError):
        engine.submit(prompt)
    engine.close()


@pytest.mark.parametrize("timeout", [None, 0.1])
def test_closing_may_cancel(timeout):
    model, tokenizer = specdec.load_tiny()
    prompt = tokenizer("Once upon a time").input_ids
    engine = an_engine(model, max_rows=2, max_length=512, stop_tokens=())
    handles = [engine.submit(prompt, max_new_tokens=500, eos_token_id=None) for _ in range(6)]
    next(iter(handles[0]))
    engine.close(finish=timeout is not None, timeout=timeout)
    results = [handle.result(0) for handle in handles]
    assert {one.finish_reason for one in results} == {"cancelled"}
    assert 0 < len(results[0].tokens) < 500


def test_a_request_with_nan_fails_alone():
    model = build_target()
    embedding = model.get_input_embeddings().weight
    before = embedding[6].clone()
    cases = [([one % 6 for one in prompt], count) for prompt, count in requests(10)]
    expected = [alone(model, prompt, count) for prompt, count in cases]
    keep = [number for number, text in enumerate(expected) if 6 not in text[:-1]]
    assert len(keep) > 3
    try:
        with torch.no_grad():
            embedding[6] = float("nan")
        with an_engine(model, make_drafter("medusa"), max_rows=3) as engine:
            handles = []
            for number in keep:
                handles.append(engine.submit(cases[number][0], max_new_tokens=cases[number][1]))
                handles.append(engine.submit([1, 6, 2], max_new_tokens=8))
            assert [one.result(PATIENCE).tokens for one in handles[::2]] == [expected[number] for number in keep]
            for one in handles[1::2]:
                with pytest.raises(RequestFailedError, match="model: expected finite logits, got NaN"):
                    one.result(PATIENCE)
                with pytest.raises(RequestFailedError):
                    list(one)
            assert engine.stats().num_finished["failed"] == len(keep)
    finally:
        with torch.no_grad():
            embedding[6] = before


def test_after_an_error_of_the_model_the_engine_goes_on(monkeypatch, caplog):
    model = build_target()
    prompt, count = requests()[0]
    with an_engine(model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.target), "score", lambda *args, **kwargs: 1 / 0)
            handle = engine.submit(prompt, max_new_tokens=9)
            with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
                handle.result(PATIENCE)
        assert engine.submit(prompt, max_new_tokens=count).result(PATIENCE).tokens == alone(model, prompt, count)
    assert "requests that were running have failed" in caplog.text


@pytest.mark.parametrize("broken", ["specdec.loop.decoder.Decoder.running", "specdec.loop.decoder.Decoder.lay_out"])
def test_where_nothing_runs_every_request_fails_and_none_waits_for_ever(broken, monkeypatch):
    model = build_target()
    with an_engine(model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(broken, lambda *args: 1 / 0)
            handles = [engine.submit(prompt, max_new_tokens=count) for prompt, count in requests()]
            for handle in handles:
                with pytest.raises(RequestFailedError, match="ZeroDivisionError"):
                    handle.result(PATIENCE)
        prompt, count = requests()[0]
        assert engine.submit(prompt, max_new_tokens=count).result(PATIENCE).tokens == alone(model, prompt, count)
        assert engine.stats().num_finished == {"failed": 14, "length": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int of at least 1, got 0"),
        ({"max_new_tokens": 60}, "max_new_tokens: expected at most 38 after a prompt of 2 tokens"),
        ({"temperature": -1, "do_sample": True}, "temperature: expected a number over 0, got -1"),
        ({"num_beams": 2}, "num_beams: expected its default"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size: expected its default"),
        ({"max_time": 3.0}, "max_time: expected its default in an engine, got 3.0; there is timeout"),
        ({"nonsense": 1}, "nonsense: expected an argument"),
        ({"seed": -1, "do_sample": True}, "seed: expected at least 0, got -1"),
        ({"logprobs": 21}, "logprobs: expected at most 20 alternatives, got 21"),
        ({"timeout": 0}, "timeout: expected seconds over 0, got 0"),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(settings, message):
    with an_engine(build_target(), max_length=40) as engine:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            engine.submit([1, 2], **settings)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ([], ValueError, "prompt: expected 1 to 39 tokens (the engine's max_length is 40), got 0"),
        ([1] * 40, ValueError, "prompt: expected 1 to 39 tokens"),
        ([7], ValueError, "prompt: expected token ids from 0 to 6, got 7"),
        ("text", TypeError, "prompt: expected token ids, got str"),
        ([1.0], TypeError, "prompt: expected token ids, got 1.0"),
        (torch.ones(1, 2).long(), TypeError, "prompt: expected a 1-D tensor"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused(prompt, kind, message):
    with an_engine(build_target(), max_length=40) as engine, pytest.raises(kind) as error:
        engine.submit(prompt)
    assert message in str(error.value)


def test_bad_sizes_are_refused():
    for name in ("max_rows", "max_queue", "prefill_tokens"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            specdec.Engine(build_target(), **{name: 0})
    with pytest.raises(ValueError, match="max_length: expected 2 to 64, the model's context, got 65"):
        specdec.Engine(build_target(), max_length=65)


def test_trees_are_cut_to_what_pays_with_the_rows_that_run():
    """With costs by which a pass over many nodes is dear, one row drafts and many decode plainly."""
    model, tokenizer = specdec.load_tiny()
    prompt = tokenizer("Once upon a time there was a dog. Once upon a time there was a dog.").input_ids
    with specdec.Engine(model, "tiny/medusa", max_rows=8, max_length=256) as engine:
        assert engine.drafter.costs is not None
        one = engine.submit(prompt, max_new_tokens=64).result(PATIENCE)
        assert one.tokens == alone(model, prompt, 64)
        handles = [engine.submit(prompt, max_new_tokens=64) for _ in range(8)]
        assert {tuple(handle.result(PATIENCE).tokens) for handle in handles} == {tuple(one.tokens)}


def test_reading_prompts_disturbs_no_planner(monkeypatch):
    """Memories of as many rows share one, which begins anew when rows move to another memory and at no other time."""
    begun, planner, change = [], Union.planner, RowPool._change
    monkeypatch.setattr(Union, "planner", lambda self, **how: (begun.append(how), planner(self, **how))[1])
    monkeypatch.setattr(RowPool, "_change", lambda self, *args: (begun.append("change"), change(self, *args))[1])
    model = build_target()
    with an_engine(model, make_drafter("union, sized")) as engine:
        handles = [engine.submit(prompt, max_new_tokens=count) for prompt, count in requests()]
        assert all(handle.result(PATIENCE) for handle in handles)
    assert len(begun) > 3
    assert begun == ["change", {"is_moved": True}] * (len(begun) // 2)


def test_many_threads_submit_and_other_calls_wait_for_the_model():
    model = build_target()
    found = {}
    with an_engine(model, make_drafter("suffix")) as engine:

        def ask(number):
            prompt, count = requests()[number]
            found[number] = engine.submit(prompt, max_new_tokens=count).result(PATIENCE).tokens

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(14)]
        for thread in threads:
            thread.start()
        between = alone(model, *requests()[0])  # the same model, hooked by one after the other
        for thread in threads:
            thread.join()
        assert between == found[0]
    assert found == {number: alone(model, *one) for number, one in enumerate(requests())}


def test_a_callback_that_raises_ends_no_other_request(caplog):
    model = build_target()
    prompt, count = requests()[0]

    def broken(handle):
        raise KeyError("mine")

    with an_engine(model) as engine:
        bad = engine.submit(prompt, max_new_tokens=count, on_progress=broken)
        good = engine.submit(prompt, max_new_tokens=count)
        assert good.result(PATIENCE).tokens == alone(model, prompt, count)
        assert bad.result(PATIENCE).finish_reason in ("cancelled", "length")
    assert "on_progress" in caplog.text


def test_waiting_for_a_result_may_end_before_it():
    model, tokenizer = specdec.load_tiny()
    with an_engine(model, max_length=512, stop_tokens=()) as engine:
        handle = engine.submit(tokenizer("One day").input_ids, max_new_tokens=300, eos_token_id=None)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="timeout: expected the end of request 0 within 0.01 s"):
            handle.result(0.01)
        assert time.monotonic() - begin < 5
        handle.cancel()

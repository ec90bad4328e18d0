"""The endpoint as clients meet it: OpenAI's own client, plain HTTP, and those that mean no good."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import specdec

pytest.importorskip("uvicorn", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the openai package")

from lib.serving import fuzz, post, raw, serving  # noqa: E402
from specdec.serving.limits import Limits  # noqa: E402
from specdec.serving.texts import VisibleText  # noqa: E402

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def tiny():
    return specdec.load_tiny()


@pytest.fixture(scope="module")
def address(tiny):
    model, tokenizer = tiny
    with (
        specdec.Engine(model, "tiny/medusa", tokenizer=tokenizer, tree=None, max_rows=4, max_length=512) as engine,
        serving(engine) as found,
    ):
        found_engine[:] = [engine]
        yield found


found_engine = []


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=60)


def expected(tiny, text, count, **settings):
    model, tokenizer = tiny
    ids = tokenizer(text, return_tensors="pt").input_ids
    new = specdec.generate(model, None, ids, max_new_tokens=count, **{"do_sample": False, **settings})[
        0, ids.shape[1] :
    ]
    return tokenizer.decode(new, skip_special_tokens=True)


def is_idle(engine, seconds=20):
    """Whether all rows become free."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == 0:
            return True
        time.sleep(0.02)
    return False


def test_a_completion_is_what_generate_writes(client, tiny):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    assert answer.choices[0].text == expected(tiny, PROMPT, 30)
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (30, usage.prompt_tokens + 30)
    assert 0 < usage.completion_tokens_details.accepted_prediction_tokens < 30


def test_a_chat_is_rendered_by_its_template(client, tiny):
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, temperature=0)
    assert answer.choices[0].message.content == expected(tiny, "<system>Be\n<user>Hi\n<assistant>", 20)
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_is_the_same_text_in_pieces(client, tiny):
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    chunks = list(client.completions.create(model="tiny", prompt=[PROMPT, "Tom"], max_tokens=25, **options))
    for index, prompt in enumerate((PROMPT, "Tom")):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert len(own) > 3
        assert "".join(one.text for one in own) == expected(tiny, prompt, 25)
        assert [one.finish_reason for one in own if one.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 50
    messages = [{"role": "user", "content": "Hi"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(tiny, "<user>Hi\n<assistant>", 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_text_and_is_no_part_of_it(client, tiny, stream):
    whole = expected(tiny, PROMPT, 60)
    stop = whole[17:25]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=["never", stop], stream=stream
    )
    parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize("text", ["one two three", "ababac", "xx", "onetwo"])
@pytest.mark.parametrize("stop", [["two"], ["abac", "b!"], ["e t", "o"], ["nothing"]])
def test_nothing_of_a_stop_string_is_shown_however_it_is_cut(text, stop):
    class Letters:
        def decode(self, ids, **_):
            return "".join(map(chr, ids))

    end = min((text.index(one) for one in stop if one in text), default=len(text))
    for size in range(1, len(text)):
        shown = VisibleText(Letters(), [], stop)
        ids = [ord(letter) for letter in text]
        pieces = [shown.add(ids[first : first + size]) for first in range(0, len(ids), size)]
        assert "".join(pieces) + shown.rest() == text[:end]


def test_answers_have_seeds_of_their_own(client):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "n": 3}
    first, second = (client.completions.create(**asked, seed=5).choices for _ in range(2))
    assert [one.text for one in first] == [one.text for one in second]
    assert len({one.text for one in first}) == 3
    assert client.completions.create(**asked, seed=6).choices[0].text != first[0].text


def test_log_probabilities_in_both_forms(client, tiny):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, logprobs=3)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 9
    assert "".join(told.tokens) == answer.choices[0].text
    for token, own, top, offset in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        assert max(top, key=top.get) == token
        assert top[token] == pytest.approx(own)
        assert answer.choices[0].text[offset:].startswith(token)
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, stream=True
    )
    content = [one for chunk in chat for one in (chunk.choices[0].logprobs.content or [])]
    assert len(content) == 4
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 2 for one in content)


def test_a_client_that_leaves_frees_its_row(client, address):
    engine = found_engine[0]
    before = engine.stats().num_finished.get("cancelled", 0)
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=480, temperature=1.0, stream=True)
    next(iter(stream))
    stream.close()
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 480}).encode()
    raw(address, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert is_idle(engine)
    assert engine.stats().num_finished.get("cancelled", 0) >= before + 1


def test_models_health_and_metrics(client, address):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0)
    import urllib.request

    assert json.load(urllib.request.urlopen(f"{address}/health")) == {"status": "ok"}
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    for name in ("specdec_http_requests_total", "specdec_generated_tokens_total", "specdec_acceptance_length"):
        assert re.search(rf"^{name}(\{{.*\}})? [0-9.]+$", text, re.M), name
    assert 'specdec_requests_total{reason="length"}' in text
    assert "specdec_time_to_first_token_seconds_count" in text
    assert 'specdec_acceptance_at_depth{depth="1"}' in text


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model: expected 'tiny', got 'gpt'"),
        ({"prompt": "x " * 600}, openai.BadRequestError, "prompt: expected 1 to 511 tokens"),
        ({"max_tokens": 600}, openai.BadRequestError, "max_new_tokens: expected at most"),
        ({"n": 17}, openai.BadRequestError, "n: expected at most 16 answers"),
        ({"presence_penalty": 1.0}, openai.BadRequestError, "presence_penalty: expected its default"),
        ({"best_of": 3}, openai.BadRequestError, "best_of: expected its default"),
        ({"stop": [""]}, openai.BadRequestError, "stop: expected texts of at least one character"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [99999]}, openai.BadRequestError, "prompt: expected token ids from 0 to"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options: expected none"),
        ({"extra_body": {"beams": 4}}, openai.BadRequestError, "beams: Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(client, settings, error, message):
    with pytest.raises(error) as found:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **settings})
    assert message in found.value.message


@pytest.mark.parametrize(
    "body", [b'{"model": "tiny", "prompt": "\\ud83d"}', b'{"model": "tiny", "top_p": NaN}', b"\xff", b""]
)
def test_what_is_no_json_is_refused(address, body):
    status, answer, _ = post(address, "/v1/completions", body)
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")


def test_fields_that_ask_for_nothing_are_taken(client):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "best_of": 1,
        "echo": False,
        "user": "me",
        "logit_bias": {},
    }
    assert client.completions.create(model="tiny", prompt=[5, 6], max_tokens=2, temperature=0, **neutral)


def test_keys_rates_sizes_and_full_queues(tiny):
    model, tokenizer = tiny
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200}
    limits = Limits(max_body_bytes=500, requests_per_minute=12)
    sizes = {"max_rows": 1, "max_queue": 1, "max_length": 512}
    with (
        specdec.Engine(model, tokenizer=tokenizer, **sizes) as engine,
        serving(engine, key="secret", limits=limits) as address,
    ):
        key = {"authorization": "Bearer secret"}
        for wrong in ({}, {"authorization": "Bearer Secret"}, {"authorization": "secret"}):
            assert post(address, "/v1/completions", asked, **wrong)[0] == 401
        assert post(address, "/v1/completions", asked | {"prompt": "x" * 600}, **key)[0] == 413
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda _: post(address, "/v1/completions", asked, **key), range(6)))
        statuses = [status for status, _, _ in answers]
        assert statuses.count(200) >= 2
        assert set(statuses) == {200, 429}
        full = next(one for one in answers if one[0] == 429)
        assert json.loads(full[1])["error"]["code"] == "queue_full"
        assert int(full[2]["Retry-After"]) >= 1
        for _ in range(8):
            status, body, headers = post(address, "/v1/completions", asked | {"max_tokens": 1}, **key)
        assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 61


def test_a_closed_engine_answers_503(tiny):
    model, tokenizer = tiny
    engine = specdec.Engine(model, tokenizer=tokenizer, max_rows=1, max_length=64)
    with serving(engine) as address:
        engine.close()
        status, body, _ = post(address, "/v1/completions", {"model": "tiny", "prompt": PROMPT})
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")


def test_a_request_that_fails_is_told_so(tiny, monkeypatch):
    model, tokenizer = tiny
    with specdec.Engine(model, tokenizer=tokenizer, max_rows=2, max_length=64) as engine, serving(engine) as address:
        monkeypatch.setattr(type(engine.target), "score", lambda *args, **kwargs: 1 / 0)
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8}
        status, body, _ = post(address, "/v1/completions", asked)
        assert (status, json.loads(body)["error"]["code"]) == (500, "request_failed")
        status, body, _ = post(address, "/v1/completions", asked | {"stream": True})
        assert status == 200
        assert b'"code": "request_failed"' in body
        assert body.endswith(b"data: [DONE]\n\n")


def test_no_request_hurts_the_server(address, client, tiny):
    """A slice of the thousand that `python -m lib.fuzz_server` in `tests` sends."""
    wrong, statuses = fuzz(address, first_seed=0, count=120)
    assert wrong == []
    assert statuses[400] > 20
    assert is_idle(found_engine[0])
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    assert answer.choices[0].text == expected(tiny, PROMPT, 30)


def test_many_clients_at_once_get_their_own_texts(client, tiny):
    prompts = [
        f"{name} went to the {place}" for name in ("Tom", "Lily", "A dog", "Sam") for place in ("park", "shop", "sea")
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        answers = list(
            threads.map(
                lambda prompt: client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0),
                prompts,
            )
        )
    assert [one.choices[0].text for one in answers] == [expected(tiny, prompt, 24) for prompt in prompts]


def server_process(*options):
    command = [sys.executable, "-m", "specdec.commands.cli", "serve", "--model", "tiny", "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_signal_under_load_loses_nothing_that_was_promised(tiny):
    """Streams that run go on to their ends, or are returned with what they have; no new ones are taken."""
    process = server_process("--max-rows", "2", "--max-length", "400", "--grace-seconds", "1")
    try:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=60)

        def ask(count):
            asked = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "stream": True}
            try:
                stream = client.completions.create(model="tiny", **asked)
            except (openai.APIConnectionError, openai.InternalServerError) as error:
                if getattr(error, "status_code", 503) != 503:
                    raise
                return None  # it came too late, and nothing was promised
            return [chunk.choices[0] for chunk in stream]

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(ask, count) for count in (20, 390, 390, 390, 390, 30, 390, 390)]
            asked[0].result(30)
            process.send_signal(signal.SIGTERM)
            parts = [pieces for one in asked if (pieces := one.result(60)) is not None]
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert len(parts) > 2
    whole = expected(tiny, PROMPT, 390)
    for pieces in parts:
        assert pieces[-1].finish_reason in ("length", "stop", "cancelled")
        assert whole.startswith("".join(piece.text for piece in pieces))
    assert any(pieces[-1].finish_reason == "length" for pieces in parts)


def test_a_port_in_use_and_a_wrong_option_are_told_in_a_line(address):
    port = address.rpartition(":")[2]
    process = server_process("--port", port)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.startswith(f"specdec: error: --host, --port: expected an address that is free, got 127.0.0.1:{port}")
    assert len(error.splitlines()) == 1
    assert out == ""

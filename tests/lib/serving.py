"""A server in this process for tests, and requests that no server should mind."""

import asyncio
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import uvicorn

from specdec.serving.app import create_app
from specdec.serving.running import listening_socket

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@contextmanager
def serving(engine, **settings):
    """The address of a server that answers from an engine."""
    bound = listening_socket("127.0.0.1", 0)
    app = create_app(engine, **{"name": "tiny", "chat_template": CHATML, **settings})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        bound.close()


def post(address, path, body, **headers):
    """Status, body and headers of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def raw(address, data, *, then=0):
    """Send bytes, read `then` bytes, and go away."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        connection.settimeout(0.2)  # there may be nothing to read
        with suppress(TimeoutError):
            return connection.recv(then) if then else b""
    return b""


def fuzzed(seed):
    """A request that is wrong in some way, or leaves in the middle: path, body, headers, and whether it is sent raw."""
    draw = random.Random(seed)
    path = draw.choice(["/v1/completions", "/v1/chat/completions"])
    good = {"model": "tiny", "max_tokens": draw.randint(1, 6), "temperature": draw.choice([0, 0.7])}
    good |= {"prompt": "Once"} if path.endswith("v1/completions") else {"messages": [{"role": "user", "content": "Hi"}]}
    junk = [None, -1, 0, 1.5, "", "x", True, [], {}, [[]], [None], 10**30, "\ud83d", {"a": {}}, float("nan")]
    way = draw.choice(["json", "type", "unknown", "huge", "model", "method", "leave", "bytes", "deep"])
    if way == "json":
        text = json.dumps(good)
        return path, text[: draw.randint(0, len(text) - 1)].encode(), {}, way
    if way == "type":
        names = [*good, "n", "stop", "seed", "stream", "logprobs", "top_logprobs", "top_p", "top_k", "stream_options"]
        return path, json.dumps(good | {draw.choice(names): draw.choice(junk)}).encode(), {}, way
    if way == "unknown":
        return path, json.dumps(good | {draw.choice(["beams", "echo", "tools", "__class__"]): [1]}).encode(), {}, way
    if way == "huge":
        return path, json.dumps(good | {"prompt": "x" * draw.choice([50_000, 200_000])}).encode(), {}, way
    if way == "model":
        return path, json.dumps(good | {"model": draw.choice(["gpt-4", "", "../tiny", "x" * 999])}).encode(), {}, way
    if way == "method":
        return draw.choice(["/", "/v1", "/v1/completions/x", "/v1/models/none", "//"]), b"{}", {}, way
    if way == "bytes":
        return path, draw.randbytes(draw.randint(0, 300)), {}, way
    if way == "deep":
        return path, b"[" * draw.choice([10, 100_000]), {}, way
    body = json.dumps(good | {"stream": draw.choice([True, False]), "max_tokens": 200}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) + draw.choice([0, 0, 50])}\r\n\r\n"
    return path, head.encode() + body[: draw.choice([len(body), len(body) // 2])], {}, way


def fuzz(address, first_seed, count):
    """Send requests; returns what was neither a clean refusal nor a finished answer, and how many had each status."""
    wrong, statuses = [], {}
    for seed in range(first_seed, first_seed + count):
        path, body, headers, way = fuzzed(seed)
        if way == "leave":
            raw(address, body, then=random.Random(seed).choice([0, 0, 20, 400]))
            continue
        status, answer, _ = post(address, path, body, **headers)
        statuses[status] = statuses.get(status, 0) + 1
        is_finished = status == 200 and (answer.endswith(b"data: [DONE]\n\n") or b'"finish_reason"' in answer)
        is_refused = 400 <= status < 500 and "message" in json.loads(answer)["error"]
        if not (is_finished or is_refused):
            wrong.append((seed, way, status, answer[:200]))
    return wrong, statuses

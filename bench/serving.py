"""An endpoint under load: many streams at once for minutes, every text checked, times and memory noted.

    python -m specdec.bench.serving --model smollm2 --drafter medusa --concurrency 32 --seconds 300 --output FILE

Starts `specdec serve` on a free port and keeps as many chats open as asked, greedy, of mixed lengths; each text that
ends is compared with `specdec.generate` of the same prompt. Then the same load goes to `transformers serve` on the same
weights, if it starts here; the record says if it does not. Times are the client's: to the first token, and per token
behind it.
"""

import argparse
import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.bundled.load import load_model
from specdec.common.provenance import append_record, provenance
from specdec.generation.generate import generate

__all__ = ["main"]

START_SECONDS = 120
QUESTIONS = (
    "Name three fruits.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue.",
    "Count from one to ten.",
    "What is two plus two?",
    "Tell me about dogs.",
    "How do I boil an egg?",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A request of the load.

    Attributes:
        question: what is asked.
        limit: most new tokens.
        text: the answer that plain decoding gives.
        num_tokens: its tokens.
    """

    question: str
    limit: int
    text: str
    num_tokens: int


@dataclass(slots=True)
class Load:
    """What a load has found.

    Attributes:
        first_ms: to the first token, of each text.
        per_token_ms: per token behind it, of each text.
        num_tokens: of all texts.
        errors: what went wrong, a line each.
        num_wrong: texts that were not what they should be.
    """

    first_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    num_wrong: int = 0

    def record(self, seconds: float) -> dict[str, Any]:
        """Its figures."""
        figures: dict[str, Any] = {"num_texts": len(self.first_ms), "tokens_per_s": round(self.num_tokens / seconds, 1)}
        for name, values in (("first_ms", self.first_ms), ("per_token_ms", self.per_token_ms)):
            if len(values) > 1:
                cuts = statistics.quantiles(values, n=20)
                figures |= {f"{name}_p50": round(statistics.median(values), 1), f"{name}_p95": round(cuts[18], 1)}
        return figures | {"num_errors": len(self.errors), "errors": self.errors[:3], "num_wrong": self.num_wrong}


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status, 1 where a request failed or a text was wrong."""
    parser = argparse.ArgumentParser(prog="specdec.bench.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("smollm2",), default="smollm2", help="one with a chat template")
    parser.add_argument("--drafter", default="medusa", help="as for specdec serve (%(default)s)")
    parser.add_argument("--max-rows", type=int, default=16, help="of the engine (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="streams at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="(%(default)s)")
    parser.add_argument("--other-seconds", type=float, default=120, help="of transformers serve (%(default)s)")
    parser.add_argument("--output", type=Path, help="file of records, which a line is added to")
    options = parser.parse_args(arguments)
    expected = _expected(options.model)
    sizes = ["--max-rows", str(options.max_rows), "--max-length", "512", "--dtype", "float32"]
    command = ["specdec.commands.cli", "serve", "--model", options.model, "--drafter", options.drafter, *sizes]
    settings = {"model": options.model, "drafter": options.drafter, "max_rows": options.max_rows}
    settings |= {"concurrency": options.concurrency, "seconds": options.seconds}
    with _server([sys.executable, "-m", *command]) as (port, process):
        ours = _load(port, options.model, expected, options.concurrency, options.seconds, process.pid)
    record = {"bench": "serving", **settings, "specdec": ours, "transformers": _theirs(options, expected)}
    record["provenance"] = provenance()
    print(json.dumps(record))
    if options.output is not None:
        append_record(options.output, record)
    return 1 if ours["num_errors"] or ours["num_wrong"] else 0


def _expected(name: str) -> list[Chat]:
    """Chats of mixed lengths, with the texts that plain decoding gives."""
    model, tokenizer = load_model(name)
    found = []
    for question, limit in zip(QUESTIONS, itertools.cycle((12, 24, 48, 80)), strict=False):
        messages = [{"role": "user", "content": question}]
        ids = torch.tensor([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
        new: Any = generate(model, None, ids, max_new_tokens=limit, do_sample=False)
        tokens = new[0, ids.shape[1] :]
        found.append(Chat(question, limit, tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)))
    return found


def _theirs(options: argparse.Namespace, expected: Sequence[Chat]) -> dict[str, Any]:
    """The same of `transformers serve`, or why not."""
    model, tokenizer = load_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        command = [str(Path(sys.executable).parent / "transformers"), "serve", "--device", "cpu", "--dtype", "float32"]
        try:
            with _server(command) as (port, process):
                seconds = options.other_seconds
                return _load(port, folder, expected, options.concurrency, seconds, process.pid) | {"seconds": seconds}
        except (OSError, RuntimeError) as error:
            return {"did_not_start": str(error)[-400:]}


@contextmanager
def _server(command: Sequence[str]) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A server process on a free port of this machine, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        place = ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([*command, *place], stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{Path(command[0]).name}: expected a server, got {log.read().decode()[-300:]}")
                time.sleep(0.2)
            yield port, process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def _load(
    port: int, model: str, expected: Sequence[Chat], concurrency: int, seconds: float, pid: int
) -> dict[str, Any]:
    """Keep so many streams open for so long; those that run are waited for."""
    load, lock = Load(), threading.Lock()
    memory: list[int] = []
    begin = time.monotonic()
    turn = itertools.count()

    def client() -> None:
        while time.monotonic() - begin < seconds:
            chat = expected[next(turn) % len(expected)]
            try:
                first, last, pieces = _ask(port, model, chat)
            except (OSError, ValueError, http.client.HTTPException) as error:
                with lock:
                    load.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.5)
                continue
            with lock:
                load.first_ms.append(first)
                load.num_tokens += chat.num_tokens
                load.per_token_ms += [(last - first) / max(chat.num_tokens - 1, 1)]
                load.num_wrong += "".join(pieces) != chat.text

    threads = [threading.Thread(target=client) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        memory.append(_resident_mib(pid))
        time.sleep(1)
    fifth = max(1, len(memory) // 5)
    told = {"mib_after_a_fifth": memory[min(fifth, len(memory) - 1)], "mib_at_the_end": memory[-1]}
    return load.record(time.monotonic() - begin) | told


def _ask(port: int, model: str, chat: Chat) -> tuple[float, float, list[str]]:
    """A streamed chat: milliseconds to the first piece and to the end, and the pieces."""
    asked = {"model": model, "messages": [{"role": "user", "content": chat.question}], "stream": True}
    asked |= {"max_tokens": chat.limit, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begin, first, pieces = time.perf_counter(), None, []
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status} {response.read(200)!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            piece = "".join(one.get("delta", {}).get("content") or "" for one in chunk.get("choices", ()))
            if piece:
                first = first or time.perf_counter()
                pieces.append(piece)
    finally:
        connection.close()
    end = time.perf_counter()
    return 1e3 * ((first or end) - begin), 1e3 * (end - begin), pieces


def _resident_mib(pid: int) -> int:
    """Memory of a process; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


if __name__ == "__main__":
    sys.exit(main())

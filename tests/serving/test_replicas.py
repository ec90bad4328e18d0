"""The endpoint through Ray Serve: replicas answer as one process does, and end in order."""

import concurrent.futures
import re
import signal
import subprocess
import sys

import pytest

from lib.batches import ENVIRONMENT, alone

openai = pytest.importorskip("openai")
pytest.importorskip("ray", reason="Ray is not installed")

PROMPT = "def read_line(self):\n"


def test_replicas_answer_and_finish_what_runs_when_a_signal_comes():
    options = ["--model", "tiny", "--drafter", "medusa", "--port", "0", "--max-length", "400", "--grace-seconds", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec.commands.cli", "serve", *options, "--ray", "local", "--replicas", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=120)
        whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
        assert whole.choices[0].text == alone(PROMPT, 30)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt=PROMPT)

        def pieces(count):
            asked = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "stream": True}
            return client.completions.create(model="tiny", **asked)

        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            begun = [threads.submit(pieces, count) for count in (200, 300, 300, 300, 300, 300)]
            streams = [one.result(60) for one in begun]
            process.send_signal(signal.SIGTERM)
            texts = list(threads.map(lambda stream: "".join(chunk.choices[0].text for chunk in stream), streams))
        assert texts == [alone(PROMPT, 200), *[alone(PROMPT, 300)] * 5]
        assert process.wait(60) == 0
    finally:
        process.kill()

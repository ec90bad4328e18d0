"""Questions by name: fetched, checked, kept; from a server in this process, and without a network."""

import hashlib
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specdec.common import fetching
from specdec.evaluation.prompt_sets import (
    PUBLISHED_FILES,
    PublishedFile,
    all_questions,
    find_questions,
    known_names,
)
from specdec.evaluation.prompts import Question, QuestionSet

CONTENT = b'{"question": "How many?", "answer": "3"}\n{"question": "And then?"}\n'
HUB_ROW = {"question_id": "a", "category": "coding", "turns": ["x?", "y?"]}


class Handler(BaseHTTPRequestHandler):
    def __init__(self, replies, asked, *args):
        self.replies, self.asked = replies, asked
        super().__init__(*args)

    def do_GET(self):
        self.asked.append(self.path)
        content = self.replies.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """Address, replies by path, and the paths that were asked for; a reply may be shorter than it promises."""
    replies, asked = {"/a/set.jsonl": CONTENT}, []
    with HTTPServer(("127.0.0.1", 0), partial(Handler, replies, asked)) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", replies, asked
        http.shutdown()
        thread.join()


def published(address, content=CONTENT):
    return {"made_up": PublishedFile(address, len(content), hashlib.sha256(content).hexdigest())}


def find(files, tmp_path):
    return find_questions("made_up", home=tmp_path, published=files)


def test_a_name_is_fetched_once_and_found_without_a_network_afterwards(server, tmp_path, capsys):
    address, replies, asked = server
    files = published(f"{address}/a/set.jsonl")
    found = find(files, tmp_path)
    assert [question.turns for question in found.questions] == [("How many?",), ("And then?",)]
    assert (found.name, found.source) == ("made_up", f"{address}/a/set.jsonl")
    assert found.sha256 == files["made_up"].sha256
    assert f"made_up: fetching {address}/a/set.jsonl (67 bytes)" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "prompts").iterdir()] == ["made_up.jsonl"]
    replies.clear()
    assert find(files, tmp_path) == found
    assert asked == ["/a/set.jsonl"]
    assert capsys.readouterr().err == ""


def test_a_damaged_file_is_fetched_anew(server, tmp_path):
    files = published(f"{server[0]}/a/set.jsonl")
    file = tmp_path / "prompts" / "made_up.jsonl"
    file.parent.mkdir()
    file.write_bytes(CONTENT[:-1])
    assert len(find(files, tmp_path).questions) == 2
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (CONTENT[::-1], ValueError, "made_up: expected a file with sha256 [0-9a-f]{64} from http.*, got [0-9a-f]{64}"),
        (CONTENT[:10], RuntimeError, "got: 10 of 67 bytes. Without a network, get that file"),
        (None, RuntimeError, r"made_up: expected its questions from http://127.0.0.1.*, got: HTTP Error 404"),
    ],
    ids=["another", "half", "none"],
)
def test_another_file_leaves_the_good_one_and_nothing_half_written(server, tmp_path, content, error, message):
    address, replies, _ = server
    kept = tmp_path / "prompts" / "made_up.jsonl"
    kept.parent.mkdir()
    kept.write_bytes(b"of an older version")
    replies["/a/set.jsonl"] = content
    with pytest.raises((RuntimeError, ValueError), match=message) as raised:
        find(published(f"{address}/a/set.jsonl"), tmp_path)
    assert raised.type is error
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert kept.read_bytes() == b"of an older version"


def test_without_a_network_the_message_says_what_to_do(tmp_path):
    absent = (tmp_path / "a" / "set.jsonl.gz").as_uri()
    cached = tmp_path / "prompts" / "made_up.jsonl.gz"
    with pytest.raises(RuntimeError, match=rf"No such file.* pass its path to --prompts or put it at {cached}$"):
        find(published(absent), tmp_path)
    cached.write_bytes(CONTENT)
    with pytest.raises(ValueError, match="expected a whole gzip file"):
        find(published(absent), tmp_path)
    cached.rename(tmp_path / "set.jsonl")
    assert len(find_questions(tmp_path / "set.jsonl").questions) == 2


def test_a_full_disk_is_no_missing_network(server, tmp_path, monkeypatch):
    @contextmanager
    def full(*_):
        def show(num_bytes):
            raise OSError(28, "No space left on device")

        yield show

    monkeypatch.setattr(fetching, "show_progress", full)
    with pytest.raises(OSError, match="No space left on device"):
        find(published(f"{server[0]}/a/set.jsonl"), tmp_path)
    assert list((tmp_path / "prompts").iterdir()) == []


def test_a_file_comes_before_a_name_and_a_folder_does_not(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = published(f"{server[0]}/a/set.jsonl")
    (tmp_path / "made_up").mkdir()
    assert find(files, tmp_path).source.startswith("http")
    (tmp_path / "made_up").rmdir()
    (tmp_path / "made_up").write_text('{"prompt": "mine"}')
    assert [question.turns for question in find(files, tmp_path).questions] == [("mine",)]


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    names = "spec_bench, mt_bench, humaneval, gsm8k, speed_bench, bundled"
    for name in ("mtbench", tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"prompts: expected a file, one of {names}, or .*there is no such"):
            find_questions(name)
    assert ", ".join(known_names()) == names


def test_the_bundled_prompts_need_no_network():
    found = find_questions("bundled")
    assert len(found.questions) >= 8
    assert (found.name, found.source) == ("bundled", "bundled")


def test_data_sets_of_the_hub_go_through_their_library(monkeypatch, capsys):
    calls = []

    class Library:
        @staticmethod
        def load_dataset(*name, split):
            calls.append((*name, split))
            return [HUB_ROW]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Library)
    found = find_questions("speed_bench")
    assert (found.name, found.source) == ("speed_bench", "nvidia/SPEED-Bench/qualitative:test")
    assert found.questions == (Question("a", "coding", ("x?", "y?")),)
    assert "speed_bench: reading nvidia/SPEED-Bench/qualitative:test from the hub" in capsys.readouterr().err
    assert find_questions("some/thing:test").questions == found.questions
    assert list(dict.fromkeys(calls)) == [("nvidia/SPEED-Bench", "qualitative", "test"), ("some/thing", None, "test")]
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r"hub needs datasets: pip install 'specdec-triton\[data\]'"):
        find_questions("speed_bench")


def test_published_files_are_those_of_one_commit():
    for name, file in PUBLISHED_FILES.items():
        parts = file.address.removeprefix("https://raw.githubusercontent.com/").split("/")
        assert len(parts[2]) == 40, name
        assert len(bytes.fromhex(file.sha256)) == 32, name


def test_several_sets_keep_their_questions_apart():
    first = QuestionSet("a", "a", "", (Question("1", "", ("x",)), Question("2", "c", ("y",))), ())
    second = QuestionSet("b", "b", "", (Question("1", "", ("z",)),), ())
    assert all_questions([first]) == list(first.questions)
    both = [(question.name, question.category) for question in all_questions([first, second])]
    assert both == [("a/1", "a"), ("a/2", "c"), ("b/1", "b")]
    with pytest.raises(ValueError, match="expected each set once, got a several times"):
        all_questions([first, second, first])

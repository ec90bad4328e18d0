"""Texts are tokenised once: the cache is found, shared, remade when it is stale or broken, and never in the way."""

import json
import multiprocessing
import os
import time

import pytest

from lib.chat_data import byte_tokenizer, template_text
from specdec.training.data import read_samples, reading, token_cache

SETTINGS = {"max_length": 200, "vocab_size": 320, "chat_template": template_text("chatml")}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file that is large enough to be cached."""
    monkeypatch.setattr(token_cache, "CACHED_BYTES", 100)
    return write(tmp_path / "data.jsonl", 9)


def write(path, count):
    rows = [{"question": f"What is {n}?", "answer": f"{n} is the number {n}."} for n in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"odd": 1}]))
    return path


def read(path, **changes):
    return read_samples(path, byte_tokenizer(), **{**SETTINGS, **changes})


def content(samples):
    return [(sample.tokens.tolist(), sample.loss_mask.tolist()) for sample in samples]


def caches(folder):
    return sorted(folder.glob(".data.jsonl.*"))


def refuse_to_read(monkeypatch):
    monkeypatch.setattr(reading, "rows_of", lambda source: pytest.fail("the data was read again"))


def test_the_second_reading_is_from_the_cache_and_the_same(data, monkeypatch, caplog):
    first = read(data)
    assert [path.suffix for path in caches(data.parent)] == [".tokens"], "no lock is left behind"
    monkeypatch.setattr(token_cache, "CACHED_BYTES", 10**9)
    assert content(read(data)) == content(first), "from the file itself"
    monkeypatch.setattr(token_cache, "CACHED_BYTES", 100)
    refuse_to_read(monkeypatch)
    caplog.clear()
    second = read(data)
    assert content(second) == content(first)
    assert second[1].tokens.dtype == first[1].tokens.dtype
    assert content(second[2:4]) == content(first)[2:4]
    assert second[-1].tokens.tolist() == content(first)[-1][0]
    with pytest.raises(IndexError):
        second[9]
    assert "left out 1 of 10 texts: of no known form" in caplog.text, "what is left out is told each time"


def test_small_files_are_not_cached(data, monkeypatch):
    monkeypatch.setattr(token_cache, "CACHED_BYTES", 1 << 20)
    read(data)
    assert not caches(data.parent)


def test_other_settings_have_a_cache_of_their_own_and_other_data_replace_it(data):
    read(data)
    for changes in ({"max_length": 190}, {"chat_template": template_text("vicuna")}, {"vocab_size": 321}):
        before = len(caches(data.parent))
        read(data, **changes)
        assert len(caches(data.parent)) == before + 1
    near = data.with_name(".data.jsonl.old.0123456789abcdef.tokens")  # of a file that is called data.jsonl.old
    near.write_bytes(b"")
    write(data, 12)
    assert len(read(data)) == 12
    assert len(caches(data.parent)) == 2, "those of the old data are gone"
    assert near.exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: b"", lambda content: b"x" * 99])
def test_a_broken_cache_is_written_anew(damage, data):
    first = content(read(data))
    (cache,) = caches(data.parent)
    whole = cache.read_bytes()
    cache.write_bytes(damage(whole))
    assert content(read(data)) == first
    assert cache.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to_leaves_the_users_cache(data, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(token_cache.os, "access", lambda folder, mode: False)
    first = content(read(data))
    assert not caches(data.parent)
    assert len(caches(tmp_path / "home" / "tokens")) == 1
    refuse_to_read(monkeypatch)
    assert content(read(data)) == first


def test_a_full_disk_costs_the_cache_alone(data, monkeypatch, caplog):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "replace_file", full)
    assert len(read(data)) == 9
    assert "the tokens could not be kept" in caplog.text
    assert not caches(data.parent)


def _read_slowly(path, counts):
    rows_of = reading.rows_of

    def slow(source):
        with counts.get_lock():
            counts.value += 1
        time.sleep(0.3)
        return rows_of(source)

    reading.rows_of, token_cache.CACHED_BYTES = slow, 100
    os._exit(0 if len(read(path)) == 9 else 1)


def test_of_several_processes_one_reads(data):
    context = multiprocessing.get_context("fork")
    counts = context.Value("i", 0)
    processes = [context.Process(target=_read_slowly, args=(data, counts)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert counts.value == 1
    assert len(caches(data.parent)) == 1

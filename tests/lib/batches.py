"""Files of prompts, and what the tiny model answers to them one by one."""

import json
import os
import subprocess
import sys

import specdec
from specdec.bundled.load import load_tiny
from specdec.jobs.batch import answer_file, answering

NAMES = ("add", "close", "read_line", "name", "walk", "flush", "is_open", "copy", "split", "join", "sort", "find")
COMMAND = [sys.executable, "-m", "specdec.commands.cli", "batch", "--model", "tiny", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(path):
    return [[answer["text"] for answer in line["answers"]] for line in lines_of(path)]


def prompts(count):
    return [{"prompt": f"def {NAMES[i % len(NAMES)]}{i or ''}(self{', value' * (i % 3)}):\n"} for i in range(count)]


def prompts_file(folder, count):
    return write_lines(folder / "prompts.jsonl", *prompts(count))


def alone(text, count, **settings):
    """What the model continues a text with, by itself."""
    model, tokenizer = load_tiny()
    ids = tokenizer(text, return_tensors="pt").input_ids
    new = specdec.generate(model, None, ids, max_new_tokens=count, **{"do_sample": False, **settings})
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


def answer(data, output, settings, *, model=None, drafter=None, tree=None, max_rows=4, context=512):
    """Answer a file in this process; the summary."""
    tiny, tokenizer = load_tiny()

    def writer(room, _):
        engine = specdec.Engine(
            model or tiny, drafter, tokenizer=tokenizer, tree=tree, max_rows=max_rows, max_length=room
        )
        return answering(engine, settings)

    vocab_size = tiny.config.vocab_size
    return answer_file(data, output, settings, writer, tokenizer=tokenizer, vocab_size=vocab_size, context=context)


def command(*options, **settings):
    """Start `specdec batch` in a process of its own."""
    return subprocess.Popen(
        [*COMMAND, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"env": ENVIRONMENT, **settings},
    )

"""`specdec batch`: a file of prompts to a file of answers."""

import argparse
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.common.engines import add_engine, add_ray, check_ray, load_engine
from specdec.commands.common.options import add_chat_template, bundled, chat_template_of, check_positive, given

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from specdec.commands.common.options import Commands
    from specdec.jobs.batch import BatchSettings
    from specdec.jobs.writing import EngineWriter, Writer

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("batch", help="answer all prompts of a file")
    add_engine(parser)
    data = "prompts: JSON lines, a JSON array or parquet of texts, questions, conversations; or a data set of the hub"
    turns = "which answers of a conversation are written (default: %(default)s)"
    chat = "texts are what a user says to a chat model (--no-chat: questions without a template); default: by the row"
    stop = "a text that ends an answer; may be repeated"
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file; answers that are there are kept")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, the most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: 1, all tokens")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, all tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--turns", choices=("all", "last"), default="all", help=turns)
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help=chat)
    add_chat_template(parser)
    add_ray(parser, "--ray-workers")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from transformers import AutoConfig, AutoTokenizer

    from specdec.bundled.load import source_of
    from specdec.jobs.batch import BatchSettings, answer_file

    check_positive(options, "max_rows", "prefill_tokens")
    check_ray(options, "--ray-workers")
    if options.ray is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--ray: expected one process, whose workers Ray starts, got several of torchrun's")
    names = "max_new_tokens", "max_length", "temperature", "top_p", "top_k", "seed", "turns", "chat"
    template = chat_template_of(options)
    settings = BatchSettings(**given(options, *names), stop=tuple(options.stop), chat_template=template)
    bundled(options.model, options.drafter)  # a wrong name is told before anything is read
    source = source_of(options.model)
    config = AutoConfig.from_pretrained(source).get_text_config()
    summary = answer_file(
        options.data,
        options.output,
        settings,
        functools.partial(_writer, options, settings),
        tokenizer=AutoTokenizer.from_pretrained(source),
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
    )
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        print(json.dumps(summary.record()))
    return 0


def _writer(
    options: argparse.Namespace, settings: "BatchSettings", room: int, count: int
) -> "AbstractContextManager[Writer]":
    """Writes `count` texts of at most `room` tokens, here or through Ray."""
    num_rows = min(options.max_rows, count)
    open_writer = functools.partial(_engine_writer, options, settings, room, num_rows)
    if options.ray is None:
        return open_writer()
    try:
        from specdec.jobs.workers import RayWriter
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray: expected its extra, got no {error.name}; pip install 'specdec-triton[ray]'") from None
    return RayWriter(open_writer, num_texts=2 * num_rows, num_workers=options.ray_workers, address=options.ray)


def _engine_writer(options: argparse.Namespace, settings: "BatchSettings", room: int, num_rows: int) -> "EngineWriter":
    from specdec.jobs.batch import answering

    return answering(load_engine(options, max_rows=num_rows, max_length=room, max_queue=4 * num_rows), settings)

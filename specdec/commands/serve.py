"""`specdec serve`: an OpenAI-compatible endpoint."""

import argparse
import os
from typing import TYPE_CHECKING

from specdec.commands.common.options import (
    add_chat_template,
    add_pair,
    as_tree_option,
    bundled,
    chat_template_of,
    check_positive,
    load_target,
    read_settings,
)

if TYPE_CHECKING:
    from specdec.commands.common.options import Commands
    from specdec.engine.engine import Engine

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("serve", help="an OpenAI-compatible endpoint on this machine")
    add_pair(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free (default: %(default)s)")
    parser.add_argument("--name", help="by which clients ask for the model (default: that of --model)")
    parser.add_argument("--max-rows", type=int, default=16, help="requests side by side; default: %(default)s")
    parser.add_argument("--max-length", type=int, help="most tokens of a request, prompt and answer together")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait; default: %(default)s")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="read between two steps; default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=int, default=1024, help="where a client says none; default: %(default)s"
    )
    parser.add_argument("--max-body-bytes", type=int, default=2**20, help="of a request; default: %(default)s")
    parser.add_argument("--requests-per-minute", type=int, help="of one client; default: any number")
    parser.add_argument("--grace-seconds", type=float, default=30.0, help="for requests that run when a signal comes")
    add_chat_template(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_positive(options, "max_rows", "max_queue", "prefill_tokens", "max_new_tokens", "max_body_bytes")
    try:
        from specdec.serving.app import KEY_VARIABLE, create_app
        from specdec.serving.limits import Limits
        from specdec.serving.running import listening_socket, run_server
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve: expected its extra, got no {error.name}; pip install 'specdec-triton[serve]'"
        ) from error

    limits = Limits(
        max_body_bytes=options.max_body_bytes,
        max_new_tokens=options.max_new_tokens,
        requests_per_minute=options.requests_per_minute,
    )
    bound = listening_socket(options.host, options.port)  # a port that is taken is told before the model is read
    try:
        template = chat_template_of(options)
        engine = load_engine(options)
    except BaseException:
        bound.close()
        raise
    name = options.name or os.path.basename(options.model.rstrip("/"))
    host, port = bound.getsockname()[:2]
    if host not in ("127.0.0.1", "::1") and not os.environ.get(KEY_VARIABLE):
        print(f"anyone who reaches {host} may use this model: {KEY_VARIABLE} is not set", flush=True)
    app = create_app(engine, name=name, chat_template=template, limits=limits)
    print(f"serving {name} with {engine.drafter.kind} at http://{host}:{port}/v1", flush=True)
    run_server(app, engine, bound, grace_seconds=options.grace_seconds)
    return 0


def load_engine(options: argparse.Namespace) -> "Engine":
    """The engine that the options name."""
    from specdec.engine.engine import Engine
    from specdec.models.target.target import Target
    from specdec.tuning.auto import AUTO, load_drafter

    source = bundled(options.model, options.drafter)  # a wrong name is told before the target is read
    settings = read_settings("--drafter-set", options.drafter_set)
    model, tokenizer = load_target(options.model, options)
    target, tree = Target(model), as_tree_option(options.tree)
    drafter = load_drafter(source, target, tree=None if tree == AUTO else tree, **settings)
    return Engine(
        target,
        drafter,
        tokenizer=tokenizer,
        tree=AUTO if tree in (None, AUTO) else None,
        max_rows=options.max_rows,
        max_length=options.max_length,
        max_queue=options.max_queue,
        prefill_tokens=options.prefill_tokens,
    )

"""`specdec serve`: an OpenAI-compatible endpoint."""

import argparse
import functools
import os
from typing import TYPE_CHECKING

from specdec.commands.common.engines import add_engine, add_ray, check_ray, load_engine
from specdec.commands.common.options import add_chat_template, bundled, chat_template_of, check_positive

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from starlette.applications import Starlette

    from specdec.commands.common.options import Commands
    from specdec.engine.engine import Engine

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("serve", help="an OpenAI-compatible endpoint on this machine")
    add_engine(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free (default: %(default)s)")
    parser.add_argument("--name", help="by which clients ask for the model (default: that of --model)")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait; default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=int, default=1024, help="where a client says none; default: %(default)s"
    )
    parser.add_argument("--max-body-bytes", type=int, default=2**20, help="of a request; default: %(default)s")
    parser.add_argument("--requests-per-minute", type=int, help="of one client; default: any number")
    parser.add_argument("--grace-seconds", type=float, default=30.0, help="for requests that run when a signal comes")
    add_chat_template(parser)
    add_ray(parser, "--replicas")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_positive(options, "max_rows", "max_queue", "prefill_tokens", "max_new_tokens", "max_body_bytes")
    check_ray(options, "--replicas")
    try:
        from specdec.serving.app import KEY_VARIABLE
        from specdec.serving.limits import Limits
        from specdec.serving.running import listening_socket
    except ModuleNotFoundError as error:
        raise _missing("serve", error) from None

    limits = Limits(
        max_body_bytes=options.max_body_bytes,
        max_new_tokens=options.max_new_tokens,
        requests_per_minute=options.requests_per_minute,
    )
    options.name = options.name or os.path.basename(options.model.rstrip("/"))
    template, key = chat_template_of(options), os.environ.get(KEY_VARIABLE)
    bound = listening_socket(options.host, options.port)  # a port that is taken is told before the model is read
    options.host, options.port = bound.getsockname()[:2]
    if options.host not in ("127.0.0.1", "::1") and not key:
        print(f"anyone who reaches {options.host} may use this model: {KEY_VARIABLE} is not set", flush=True)
    create = functools.partial(_create_app, options, chat_template=template, limits=limits, key=key)
    with bound:
        if options.ray is None:
            _serve_here(options, create, bound)
            return 0
    _serve_with_ray(options, create)  # whose own processes listen there
    return 0


def _create_app(options: argparse.Namespace, **settings: "Any") -> "tuple[Engine, Starlette]":
    """An engine and what answers from it."""
    from specdec.serving.app import create_app

    sizes = {"max_rows": options.max_rows, "max_length": options.max_length, "max_queue": options.max_queue}
    engine = load_engine(options, **sizes)
    return engine, create_app(engine, name=options.name, **settings)


def _serve_here(
    options: argparse.Namespace, create: "Callable[[], tuple[Engine, Starlette]]", bound: "socket.socket"
) -> None:
    """One engine in this process."""
    from specdec.serving.running import run_server

    engine, app = create()
    _tell(options, engine.drafter.kind)
    run_server(app, engine, bound, grace_seconds=options.grace_seconds)


def _serve_with_ray(options: argparse.Namespace, create: "Callable[[], tuple[Engine, Starlette]]") -> None:
    """An engine in each replica."""
    try:
        import ray

        from specdec.jobs.cluster import connect
        from specdec.serving.replicas import run_replicas
    except ModuleNotFoundError as error:
        raise _missing("ray", error) from None

    bundled(options.model, options.drafter)  # a wrong name is told before the cluster is asked
    connect(options.ray)
    try:
        run_replicas(
            lambda: create()[1],
            num_replicas=options.replicas,
            max_requests=options.max_rows + options.max_queue,
            host=options.host,
            port=options.port,
            grace_seconds=options.grace_seconds,
            on_ready=lambda: _tell(options, options.drafter),
        )
    finally:
        ray.shutdown()


def _tell(options: argparse.Namespace, drafter: str) -> None:
    print(f"serving {options.name} with {drafter} at http://{options.host}:{options.port}/v1", flush=True)


def _missing(extra: str, error: ModuleNotFoundError) -> ValueError:
    return ValueError(f"serve: expected its extra, got no {error.name}; pip install 'specdec-triton[{extra}]'")

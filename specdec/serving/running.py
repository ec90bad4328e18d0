"""A server in this process: a socket, signals, and an orderly end."""

import logging
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn

from specdec.engine.engine import Engine

__all__ = ["listening_socket", "run_server"]

_LOG = logging.getLogger("specdec")
_BACKLOG = 2048  # connections that may wait to be taken
_RETURN_SECONDS = 10  # that cancelled requests have to tell what they got


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens: clients that come from now on wait until a server takes it over.

    Args:
        host: an address of this machine.
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        raise OSError(f"--host, --port: expected an address that is free, got {host}:{port}: {error}") from None
    return bound


def run_server(app: Any, engine: Engine, bound: socket.socket, *, grace_seconds: float = 30.0) -> None:
    """Serve until a signal ends it.

    On SIGTERM or SIGINT no more connections are taken, and requests that run go on for `grace_seconds`; what has not
    ended by then is returned as far as it came. A second signal ends all at once. The engine is closed in the end.

    Args:
        app: of `create_app`.
        engine: what it answers from.
        bound: of `listening_socket`.
        grace_seconds: as above.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(grace_seconds + _RETURN_SECONDS),
    )
    try:
        _Server(config, engine, grace_seconds).run(sockets=[bound])
    finally:
        bound.close()
        engine.close(finish=False)


class _Server(uvicorn.Server):
    """Ends requests when the time of grace is over."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._grace = engine, grace_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """As `uvicorn.Server`."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        _LOG.warning("%s: requests that run have %g s", signal.Signals(sig).name, self._grace)
        end = {"finish": True, "timeout": self._grace}
        threading.Thread(target=self._engine.close, kwargs=end, name="specdec-closing", daemon=True).start()

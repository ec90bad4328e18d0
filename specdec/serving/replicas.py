"""The endpoint as a Ray Serve deployment: replicas, each with an engine of its own. Needs the extra `ray`."""

import logging
import signal
import threading
from collections.abc import Callable

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette

from specdec.jobs.cluster import shares

__all__ = ["run_replicas"]

_NAME = "specdec"


def run_replicas(
    create: Callable[[], Starlette],
    *,
    num_replicas: int | None,
    max_requests: int,
    host: str,
    port: int,
    grace_seconds: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve on the Ray cluster that is connected, until a signal ends it.

    On SIGTERM or SIGINT no more requests are taken, and those that run have `grace_seconds`. A replica that is lost
    loses the requests that it ran, and is made anew.

    Args:
        create: makes the application of a replica, in its process; is pickled.
        num_replicas: as for `shares`.
        max_requests: that one replica is given at a time.
        host: address of the machines that they are reached at.
        port: the same everywhere.
        grace_seconds: as above.
        on_ready: called when requests are taken.

    Raises:
        ValueError: as `shares`.
        RuntimeError: the replicas cannot be made.
    """
    num_replicas, each = shares(num_replicas, "--replicas")

    def application() -> Starlette:  # only a function is taken for what makes the application
        return create()

    replicas = serve.deployment(
        serve.ingress(application)(),
        name=_NAME,
        num_replicas=num_replicas,
        ray_actor_options=each,
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=grace_seconds,
        max_constructor_retry_count=1,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    over = threading.Event()
    before = {number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(replicas.bind(), name=_NAME, route_prefix="/")
        on_ready()
        while not over.wait(1.0):
            pass
        serve.delete(_NAME)  # waits for what runs
    except (RayServeException, RuntimeError) as error:
        raise RuntimeError(f"ray: the replicas cannot be made: {' '.join(str(error).split())[-600:]}") from error
    finally:
        serve.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)

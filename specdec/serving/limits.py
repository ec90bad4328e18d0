"""What a server takes from its clients: sizes, rates, and who they are."""

import hmac
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from starlette.requests import Request

from specdec.common.checks import check_at_least
from specdec.serving.protocol import ApiError

__all__ = ["Limits", "Rates", "check_key", "read_body"]

_MOST_CLIENTS = 4096
_WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a server.

    Attributes:
        max_body_bytes: most bytes of a request.
        max_new_tokens: most tokens of an answer where the client does not say.
        max_answers: most answers of one request, all prompts together.
        requests_per_minute: of one client, by its address; None for any number.
        write_timeout: seconds that a client may leave a stream unread.
        body_timeout: seconds that a client may take to send its request.

    Raises:
        ValueError: one below 1.
    """

    max_body_bytes: int = 2**20
    max_new_tokens: int = 1024
    max_answers: int = 16
    requests_per_minute: int | None = None
    write_timeout: float = 30.0
    body_timeout: float = 30.0

    def __post_init__(self) -> None:
        names = "max_body_bytes", "max_new_tokens", "max_answers", "requests_per_minute", "write_timeout"
        check_at_least(1, {name: getattr(self, name) for name in names})


class Rates:
    """Requests of each client in the last minute.

    Args:
        most: requests per minute; None for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Count a request.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        if self._most is None:
            return
        now = time.monotonic()
        times = self._times.setdefault(client, deque())
        self._times.move_to_end(client)
        while len(self._times) > _MOST_CLIENTS:
            self._times.popitem(last=False)
        while times and times[0] <= now - _WINDOW:
            times.popleft()
        if len(times) >= self._most:
            wait = str(int(times[0] + _WINDOW - now) + 1)
            message = f"expected at most {self._most} requests per minute, got one more"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": wait})
        times.append(now)


def check_key(request: Request, key: str | None) -> None:
    """Raise ApiError, 401, for a request without the key, if there is one."""
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise ApiError(401, "expected the server's API key as a bearer token", code="invalid_api_key")


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413, more than `most` bytes.
    """
    announced = request.headers.get("content-length", "")
    too_long = ApiError(413, f"expected a request of at most {most} bytes", code="request_too_large")
    if announced.isdigit() and int(announced) > most:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_long
        parts.append(part)
    return b"".join(parts)

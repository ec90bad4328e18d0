"""Texts written by Ray's actors, each with a target and a drafter of its own. Needs the extra `ray`.

Ray Data hands blocks of prompts to the actors and their records to this process, which alone writes the file: so what
a lost worker had not handed over is written again by another one, and every record lands once.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import ray
import ray.data
import ray.exceptions

from specdec.common.checks import check_at_least
from specdec.jobs.cluster import connect, shares
from specdec.jobs.prompts import Prompt
from specdec.jobs.running import Record
from specdec.jobs.writing import Writer

__all__ = ["RayWriter"]

MOST_RESTARTS = 3
"""Of a worker; one that finds no memory is lost again and again."""

_BLOCKS_AT_A_TIME = 2  # of a worker: the second one fills the rows that the first one leaves


class RayWriter:
    """Writes with workers of a Ray cluster.

    Args:
        open_writer: makes what a worker writes with; is pickled.
        num_texts: that a worker is given at a time, and writes once more if it is lost.
        num_workers: as for `shares`.
        address: as for `connect`.

    Raises:
        ConnectionError: as `connect`.
        ValueError: as `shares`.
    """

    def __init__(
        self,
        open_writer: Callable[[], AbstractContextManager[Writer]],
        *,
        num_texts: int,
        num_workers: int | None = None,
        address: str | None = None,
    ) -> None:
        check_at_least(1, {"num_texts": num_texts, "--ray-workers": num_workers})
        connect(address)
        self._open_writer, self._num_texts = open_writer, num_texts
        try:
            self._num_workers, self._each = shares(num_workers, "--ray-workers")
        except ValueError:
            ray.shutdown()
            raise

    def write(self, prompts: Sequence[Prompt], on_end: Callable[[Record], None]) -> None:
        """As `Writer`.

        Raises:
            RuntimeError: a worker failed, or was lost too often.
        """
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars, context.print_on_execution_start = False, False
        starts = ray.remote(num_cpus=0)(_Starts).remote(self._num_workers * (1 + MOST_RESTARTS))
        rows = [{"prompt": pickle.dumps(prompt)} for prompt in prompts]
        workers = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // self._num_texts)).map_batches(
            _Worker,
            fn_constructor_args=(self._open_writer, starts),
            batch_size=None,  # a block as it is
            compute=ray.data.ActorPoolStrategy(
                size=self._num_workers,
                max_tasks_in_flight_per_actor=_BLOCKS_AT_A_TIME + 1,
                max_concurrent_calls_per_actor=_BLOCKS_AT_A_TIME,
                enable_true_multi_threading=True,
            ),
            **self._each,
        )
        try:
            for row in workers.iter_rows():
                on_end(json.loads(row["record"]))
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"ray: a worker failed: {_reason(error)}") from error

    def __enter__(self) -> "RayWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()


class _Starts:
    """Counts the starts of all workers: Ray begins lost ones anew without an end."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self) -> bool:
        """Whether one more may start."""
        self._left -= 1
        return self._left >= 0


class _Worker:
    """What an actor holds."""

    def __init__(self, open_writer: Callable[[], AbstractContextManager[Writer]], starts: Any) -> None:
        if not ray.get(starts.take.remote()):
            raise RuntimeError("workers were lost again and again; is there memory for the model?")
        self._writer = open_writer().__enter__()  # ends with the process

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        records: list[str] = []
        self._writer.write([pickle.loads(one) for one in batch["prompt"]], lambda one: records.append(json.dumps(one)))
        return {"record": np.array(records, dtype=object)}


def _reason(error: BaseException) -> str:
    """What a worker's error says in its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

"""A job from its prompts to its file: what is there is kept, what is missing written, and in the end all is one file.

Texts do not depend on each other: each has a random seed of its own. So an interrupted job goes on where it stopped,
several processes write what one would, and the file is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from specdec.engine.engine import Engine
from specdec.jobs.interruption import ended_by_sigterm
from specdec.jobs.parts import Parts, processes
from specdec.jobs.plan import Plan
from specdec.jobs.progress import WritingProgress
from specdec.jobs.prompts import Prompt
from specdec.jobs.running import Record, Text, run_texts

__all__ = ["EngineWriter", "Writer", "write_file"]


class Writer(Protocol):
    """Writes texts."""

    def write(self, prompts: Sequence[Prompt], on_end: Callable[[Record], None]) -> None:
        """Write the texts of some prompts, and hand over the record of each as it ends."""


@dataclass(frozen=True, slots=True)
class EngineWriter:
    """Writes on an engine in this process, which it closes in the end.

    Attributes:
        engine: decodes.
        text_of: what a prompt asks for.
    """

    engine: Engine
    text_of: Callable[[Prompt], Text[Record]]

    def write(self, prompts: Sequence[Prompt], on_end: Callable[[Record], None]) -> None:
        """As `Writer`."""
        run_texts(self.engine, map(self.text_of, prompts), on_end)

    def __enter__(self) -> "EngineWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close(finish=kind is None)


def write_file(
    plan: Plan,
    output: Path,
    open_writer: Callable[[int], AbstractContextManager[Writer]],
    num_tokens: Callable[[Record], int],
    *,
    refused: Sequence[Record] = (),
) -> Mapping[int, Record]:
    """Write what is missing of a file.

    Under torchrun the missing texts are divided over the processes. A SIGTERM or Ctrl-C ends the job; what was written
    stays in the file's parts.

    Args:
        plan: the prompts, and the settings by which a line is known again.
        output: JSON lines; nothing of it changes before the end, when all parts (see `parts.py`) become one file.
        open_writer: is called once there is something to write, with the number of texts that this process will.
        num_tokens: how many tokens of a record were written, for the terminal.
        refused: lines of rows that nothing can be written for.

    Returns:
        the lines that were there, by index.

    Raises:
        ValueError: an output of other prompts or settings.
        KeyboardInterrupt: the job was told to end.
    """
    with processes() as crew, ended_by_sigterm():
        parts = Parts(output, crew.rank)
        lines = parts.read()
        plan.check(lines)
        present = {index: line for index, (_, line) in lines.items() if "error" not in line}
        crew.wait()  # until all have read: what others append from here on is not present for anybody
        missing = [prompt for prompt in plan.prompts if prompt.index not in present][crew.rank :: crew.count]
        with parts.appending() as append, WritingProgress(len(missing), crew.rank, crew.count) as progress:
            if crew.rank == 0 and (news := [line for line in refused if line["index"] not in lines]):
                append(news)

            def keep(record: Record) -> None:
                append([record])
                progress.advance(num_tokens(record))

            if missing:
                with open_writer(len(missing)) as writer:
                    progress.begin()
                    writer.write(missing, keep)
        crew.wait()
        if crew.rank == 0:
            parts.merge()
        crew.wait()
    return present

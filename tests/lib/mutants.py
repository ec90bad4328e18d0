"""Deliberate faults of the library, one or more in every room, each with the test that has to notice it.

`make mutants` applies every fault of `mutants.txt` in turn, runs its test in a process of its own, and demands that an
assertion about behaviour fails: an error of any other kind says that the fault breaks the code, not that it was seen.
Nothing is written: the process reads the changed text in place of the file. `MUTANTS_ARGS="NAME ..."` takes those with
one of the names in their title or file.
"""

import argparse
import contextlib
import linecache
import multiprocessing
import os
import shlex
import sys
import time
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.txt")
TIME_LIMIT_S = 120
# imported once for all tests; not one module of ours, as a fault may be in any
SHARED = ("rich.progress", "safetensors.torch", "transformers.models.llama.modeling_llama", "triton.language")


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` stands exactly once and becomes `new`; `test` (as pytest's arguments) must fail."""

    title: str
    file: str
    old: str
    new: str
    test: str

    def changed_text(self) -> str:
        """The file with the fault."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        assert count == 1, f"mutant '{self.title}': expected once in {self.file}, found {count} times: {self.old}"
        return text.replace(self.old, self.new)


def room_of(file: str) -> str:
    """The folder of a file; one room for all of `bench`, and one for training and its objectives."""
    folder = str(Path(file).parent)
    return "bench" if folder.startswith("bench") else folder.removesuffix("/objectives")


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """The mutants of a table: paragraphs of five lines, the third and fourth after "- " and "+ "."""
    mutants = []
    for paragraph in table.read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        if lines:
            title, file, old, new, test = lines
            assert old.startswith("- "), f"mutant '{title}': expected '- ' before the old text, got {old!r}"
            assert new.startswith("+ "), f"mutant '{title}': expected '+ ' before the new text, got {new!r}"
            mutants.append(Mutant(title, file, old[2:], new[2:], test))
    return mutants


def _apply(mutant: Mutant) -> None:
    """Let this process read the changed text, as a module and as the source of a kernel."""
    path, text = str(ROOT / mutant.file), mutant.changed_text()
    read, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self, name):
        return text.encode() if name == path else read(self, name)

    def path_stats(self, name):
        if name == path:
            raise OSError("neither read nor write bytecode")
        return stats(self, name)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = get_data, path_stats
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


class _Watch:
    """The errors with which tests failed, each as its class and the beginning of its message."""

    def __init__(self):
        self.assertions, self.others = [], []

    def pytest_exception_interact(self, node, call, report):
        error = call.excinfo.value
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        while isinstance(error, AssertionError) and error.__cause__ is not None:
            error = error.__cause__
        is_about_behaviour = isinstance(error, AssertionError | pytest.fail.Exception) and report.when == "call"
        (self.assertions if is_about_behaviour else self.others).append((node.name, said))


def _run(mutant: Mutant, answers) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _apply(mutant)
    watch = _Watch()
    arguments = [*shlex.split(mutant.test.replace("tests/", f"{ROOT}/tests/")), "-x", "-p", "no:cacheprovider"]
    status = pytest.main([*arguments, f"--rootdir={ROOT}", f"--config-file={ROOT}/pyproject.toml"], plugins=[watch])
    answers.send((int(status), watch.assertions, watch.others))


def verdict(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant's test saw it, and how; in a process of its own."""
    mutant.changed_text()  # a lost anchor is an error here, rather than there
    context = multiprocessing.get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(mutant, sender))
    process.start()
    sender.close()
    try:
        if not answers.poll(TIME_LIMIT_S):
            return False, f"no answer within {TIME_LIMIT_S} s"
        with contextlib.suppress(EOFError):
            status, assertions, others = answers.recv()
            if others:
                return False, f"breaks {others[0][0]}: {others[0][1]}"
            if assertions:
                return True, assertions[0][0]
            return False, "SURVIVES" if status == 0 else f"pytest ended with status {status}"
        return False, "the process died"
    finally:
        process.kill()
        process.join()


def main() -> int:
    """Run all mutants, or those that are asked for."""
    parser = argparse.ArgumentParser(description="Deliberate faults, and whether the tests notice them.")
    parser.add_argument("names", nargs="*", help="parts of titles or files; all mutants by default")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: mutants.txt")
    options = parser.parse_args()
    names, mutants = options.names or [""], read_mutants(options.table)
    chosen = [one for one in mutants if any(name in one.title or name in one.file for name in names)]
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read when triton and torch are imported
    for name in SHARED:
        __import__(name)
    settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])  # any example of a failure will do
    settings.load_profile("unshrunk")
    survivors = 0
    for mutant in chosen:
        begin = time.monotonic()
        is_caught, how = verdict(mutant)
        survivors += not is_caught
        mark = "  " if is_caught else "! "
        seconds = time.monotonic() - begin
        sys.stdout.write(f"{mark}{mutant.title:<58} {room_of(mutant.file):<18} {seconds:5.1f} s  {how[:150]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - survivors} of {len(chosen)} mutants were caught\n")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())

"""The table of deliberate faults fits the library, and a slice of `make mutants` notices what it should."""

import re
import subprocess
import sys

import pytest

from lib.mutants import ROOT, TABLE, read_mutants, room_of

MUTANTS = read_mutants()
SLICE = (  # quick ones from different rooms, and some that the fuzz notices
    "a round of Philox is left out",
    "the root of a step is not committed",
    "a sibling may be drawn twice",
    "a third token of a step is lost",
    "a criterion ends a text with its step",
    "a model is left in eval mode",
)


def test_every_fault_can_be_planted():
    for mutant in MUTANTS:
        assert mutant.changed_text() != (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.title
    assert len({mutant.title for mutant in MUTANTS}) == len(MUTANTS)


def test_every_room_has_a_fault():
    files = [file for layer in ("kernels", "models", "specdec", "bench") for file in (ROOT / layer).rglob("*.py")]
    rooms = {room_of(str(file.relative_to(ROOT))) for file in files if not file.name.startswith("__")}
    missing = sorted(rooms - {room_of(mutant.file) for mutant in MUTANTS})
    assert not missing, f"tests/lib/mutants.txt has no fault in: {', '.join(missing)}"


def test_the_named_tests_exist():
    for mutant in MUTANTS:
        file, _, chosen = mutant.test.partition(" -k ")
        files = [ROOT / file] if file.endswith(".py") else list((ROOT / file).glob("test_*.py"))
        names = " ".join(name for path in files for name in re.findall(r"def (test_\w+)", path.read_text("utf-8")))
        words = chosen.strip('"').split(" and ")
        assert any(word in names for word in words), f"mutant '{mutant.title}': no test {chosen} in {file}"


HARMLESS = """\
a fault that is none
kernels/common/philox.py
- range(10)
+ range(2 * 5)
tests/kernels/test_philox_uniform.py -k published_words

a fault that breaks the code
kernels/common/philox.py
- range(10)
+ range(ten)
tests/kernels/test_philox_uniform.py -k published_words"""


@pytest.mark.slow
def test_faults_are_caught_but_not_by_errors_of_their_own(tmp_path):
    table = tmp_path / "mutants.txt"
    chosen = [part for part in TABLE.read_text("utf-8").split("\n\n") if part.startswith(SLICE)]
    table.write_text("\n\n".join([*chosen, HARMLESS]), encoding="utf-8")
    command = [sys.executable, "-m", "lib.mutants", "--table", str(table)]
    run = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    *caught, survivor, broken, summary = run.stdout.splitlines()
    assert [line[:2] for line in caught] == ["  "] * len(SLICE), run.stdout
    assert re.match("! a fault that is none .* SURVIVES$", survivor)
    assert re.match("! a fault that breaks the code .*NameError", broken)
    assert summary == f"{len(SLICE)} of {len(SLICE) + 2} mutants were caught"

"""What Triton makes of every kernel for sm_80, executed on a CPU and compared with the reference.

A tier between the interpreter, which never sees the compiler, and a GPU. That it can tell is shown with faults that are
planted in the PTX, one of them by a compiler's setting: rounding a product and its sum once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.op_calls import CALLS

TESTS = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.compile, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran():
    """In a process of its own: in this one @triton.jit may have made interpreted kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "lib.ptx_calls"], cwd=TESTS, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_compiled_kernel_does_what_its_reference_does(ran):
    assert {case.split()[0] for case in ran["ops"]} == set(CALLS)
    assert {case: wrong for case, wrong in ran["ops"].items() if wrong} == {}


def test_planted_miscompiles_are_seen(ran):
    assert len(ran["faults"]) >= 9
    assert [fault for fault, seen in ran["faults"].items() if not seen] == []

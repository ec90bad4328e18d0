"""Programmatic dependent launch: off by default, and where it is on a kernel waits before it touches memory."""

import json
import os
import re
import subprocess
import sys

import pytest

from specdec.kernels.common.launch import early_start

OPS = ["add_rms_norm", "rms_norm", "rope_kv_write", "swiglu", "tree_attention"]

SCRIPT = """
import json
from specdec.bench.compiled.compile_only import _recorded_launches
from specdec.bench.compiled.cases import cases
found = {}
for name, launch in cases().items():
    if name.split("/")[0] in %r and "Llama-2-7B" in name and "float16" not in name.replace("bfloat16", ""):
        for capability in (80, 90):
            with _recorded_launches(capability) as kernels:
                launch()
            (kernel,) = kernels
            found[f"{name} {capability}"] = kernel.asm["ptx"], kernel.metadata.launch_pdl
print(json.dumps(found))
"""


def compiled(setting):
    """PTX and whether it is launched early, by case and architecture, from a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["SPECDEC_PDL"] = setting
    command = [sys.executable, "-c", SCRIPT % (OPS,)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {case.split("/")[0] for case in found} == set(OPS)
    return found


@pytest.mark.compile
def test_a_kernel_that_starts_early_waits_before_it_touches_memory():
    for case, (ptx, is_early) in compiled("1").items():
        if case.endswith(" 80"):
            assert not is_early
            assert "griddepcontrol" not in ptx
            continue
        assert is_early
        first_access = re.search(r"\b(ld|st|atom|red)\.(volatile\.)?global|cp\.async|ld\.acquire", ptx).start()
        assert 0 < ptx.find("griddepcontrol.wait") < ptx.find("griddepcontrol.launch_dependents") < first_access, case


@pytest.mark.compile
def test_nothing_starts_early_unless_it_is_asked_for():
    for ptx, is_early in compiled("0").values():
        assert not is_early
        assert "griddepcontrol" not in ptx


def test_the_setting(monkeypatch):
    monkeypatch.delenv("SPECDEC_PDL", raising=False)
    assert early_start() == {"EARLY": False}
    monkeypatch.setenv("SPECDEC_PDL", "yes")
    with pytest.raises(ValueError, match="SPECDEC_PDL: expected 0 or 1, got 'yes'"):
        early_start()


@pytest.mark.interpreter
def test_the_interpreter_launches_as_always(monkeypatch):
    monkeypatch.setenv("SPECDEC_PDL", "1")
    assert early_start() == {"EARLY": False}

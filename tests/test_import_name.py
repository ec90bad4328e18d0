"""Import names: what `import specdec` costs, and how the folder `kernels` gets on with the package of that name."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specdec.kernels

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"kernels": "specdec/kernels", "models": "specdec/models", "specdec": "specdec", "bench": "specdec/bench"}

# As much of the Hugging Face package as it takes to be recognised; `helper` stands for its submodules.
OTHER_KERNELS = {
    "kernels/__init__.py": "from kernels.helper import get_kernel\n__version__ = '0.10.3'\n",
    "kernels/helper.py": "def get_kernel(name):\n    return f'hub:{name}'\n",
    "kernels-0.10.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.3\n",
    "kernels-0.10.3.dist-info/top_level.txt": "kernels\n",
}


@pytest.fixture
def other_kernels(tmp_path) -> Path:
    """A folder of installed packages that holds a stand-in for the Hugging Face package `kernels`."""
    for name, content in OTHER_KERNELS.items():
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "site"


def run_in_root(code: str, *path: Path) -> str:
    """Run Python code as `python -c` does in the repository root, which puts the root first on sys.path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_bare_name_gives_the_installed_package(other_kernels):
    code = "import kernels; from kernels.helper import get_kernel; print(kernels.__file__, kernels.get_kernel('x'))"
    assert run_in_root(code, other_kernels) == f"{other_kernels / 'kernels' / '__init__.py'} hub:x"


@pytest.mark.parametrize("order", ["kernels, specdec.kernels", "specdec.kernels, kernels"])
def test_both_packages_live_side_by_side(other_kernels, order):
    code = f"import {order}; print(kernels.__version__, specdec.kernels.Verdict.__module__)"
    assert run_in_root(code, other_kernels) == "0.10.3 specdec.kernels.common.verdict"


def test_without_the_installed_package_the_bare_name_offers_nothing():
    code = (
        "import kernels\ntry:\n    from kernels import get_kernel\nexcept ImportError:\n    print(kernels.__version__)"
    )
    assert run_in_root(code) == "0"


@pytest.mark.parametrize("installed", [False, True])
def test_transformers_imports_from_the_repository_root(other_kernels, installed):
    code = (
        "import specdec.kernels, transformers.models.llama.modeling_llama\n"
        "from transformers.utils.import_utils import _is_package_available, is_kernels_available\n"
        "is_kernels_available()\n"
        "print(_is_package_available('kernels', return_version=True)[1], specdec.kernels.Verdict.__name__)"
    )
    version = "0.10.3" if installed else "0"
    assert run_in_root(code, *[other_kernels] * installed) == f"{version} Verdict"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("specdec", ["torch", "triton", "transformers"]),
        ("specdec.kernels", ["torch", "triton", "transformers"]),
        ("specdec.kernels.reference", ["triton", "transformers"]),
    ],
)
def test_import_is_light(module, absent):
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    assert run_in_root(code) == "[]"


@pytest.mark.parametrize("name", specdec.kernels.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(specdec.kernels, name) is not None
    assert name in dir(specdec.kernels)


def test_an_op_is_never_hidden_by_the_module_of_its_name():
    code = (
        "import specdec.kernels.rms_norm\n"
        "from specdec.kernels.rms_norm import rms_norm as direct\n"
        "from specdec.kernels import rms_norm\n"
        "print(rms_norm is direct is specdec.kernels.rms_norm, callable(rms_norm))"
    )
    assert run_in_root(code) == "True True"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'specdec\.kernels' has no attribute 'attention'"):
        specdec.kernels.attention  # the access is the test


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(tmp_path):
    # a build writes into the folder it builds, so it gets a copy
    source, expected = tmp_path / "source", set()
    for folder, package in LAYERS.items():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
        files = [file for file in (source / folder).rglob("*") if file.is_file()]
        expected |= {f"{package}/{file.relative_to(source / folder).as_posix()}" for file in files}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected

"""The rules of CONTRIBUTING.md that a program can check, on the source alone: nothing of specdec is imported here."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["kernels", "models", "specdec", "bench"]  # the top-level folders

# The rooms of the house, from the ground up: each may import itself and what precedes it.
ROOMS = [
    "kernels/common",
    "kernels/reference",
    "kernels",
    "models/common",
    "models/networks",
    "models/networks/blocks",
    "models/published",
    "models/target",
    "models",
    "specdec/common",
    "specdec/bundled",
    "specdec/trees",
    "specdec/drafting",
    "specdec/drafters/weightless",
    "specdec/drafters/union",
    "specdec/drafters",
    "specdec/loop",
    "specdec/tuning",
    "specdec/generation",
    "specdec/engine",
    "specdec/training/data",
    "specdec/evaluation",
    "specdec/evaluation/report",
    "specdec/jobs",
    "specdec/training/distill",
    "specdec/training/objectives",
    "specdec/training/runs",
    "specdec/training",
    "specdec/serving",
    "specdec/commands/common",
    "specdec/commands",
    "specdec",
    "bench/common",
    "bench/decoding",
    "bench/compiled",
    "bench/kernels",
    "bench/claims",
    "bench/campaign",
    "bench",
]
MAX_MODULES = 14  # in a room; one that needs more is two rooms
ONE_MODULE_PER_OP = frozenset({"kernels", "kernels/reference", "bench/kernels"})

MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60  # signature and body; docstrings are free
MAX_KERNEL_LINES = 80  # body
# Files or "file::function" that are longer and say why in their docstring.
ARGUED_SIZES: frozenset[str] = frozenset()

# Names that mean two things in the field (docs/glossary.md), and a decorator that needs a device.
BANNED = re.compile(r"\b(accept_length|acc_len)\b|@triton\.autotune\b")
WHERE_BANNED_NAMES_ARE_EXPLAINED = frozenset({"docs/glossary.md", "CONTRIBUTING.md", "tests/test_architecture.py"})
# A path that exists on one machine only; in URLs and globs these words follow another character.
MACHINE_PATH = re.compile(r"(?<![\w.*~>}])/(home|root|tmp|Users|mnt|opt)/")

TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".cfg", ".sh", ""})
MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")


@cache
def project_files() -> tuple[Path, ...]:
    """Every file that is tracked by git or would be; without git, every file that no build or cache made."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        made = re.compile(
            r"(^|/)(\.\w+_cache|\.venv|\.hypothesis|\.benchmarks|__pycache__|build|dist|[^/]*\.egg-info)/"
        )
        files = [file for file in ROOT.rglob("*") if not made.search(file.relative_to(ROOT).as_posix())]
    return tuple(sorted(file for file in files if file.is_file()))


def python_files(*folders: str) -> list[Path]:
    return [file for file in project_files() if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in folders]


def text_files() -> list[Path]:
    return [file for file in project_files() if file.suffix in TEXT_SUFFIXES]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def one_per_line(findings: list[str]) -> str:
    return "\n" + "\n".join(sorted(findings))


def imported_modules(tree: ast.AST) -> list[str]:
    """Dotted names of everything imported anywhere in a file; a leading dot marks a relative import."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def room_of(file: Path) -> str:
    return file.parent.relative_to(ROOT).as_posix()


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name; a package is its `__init__.py`."""
    found = {}
    for file in python_files(*LAYERS):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join((*(() if parts[0] == "specdec" else ("specdec",)), *parts)).removesuffix(".__init__")] = file
    return found


def module_of(imported: str) -> str | None:
    """The module of the product that an imported dotted name is, or lives in."""
    while imported:
        if imported in modules():
            return imported
        imported = imported.rpartition(".")[0]
    return None


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Which modules of the product each one imports; the names of `specdec` itself are fetched on first use."""
    return {
        name: frozenset({module_of(imported) for imported in imported_modules(parsed(file))} - {None, name, "specdec"})
        for name, file in modules().items()
    }


def functions(file: Path) -> list[tuple[str, ast.FunctionDef]]:
    """Every function and method of a file with its dotted name; nested functions belong to the outer one."""
    found = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((prefix + node.name, node))
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                visit([*node.body, *getattr(node, "orelse", [])], prefix)

    visit(parsed(file).body, "")
    return found


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring; of a kernel, without its signature too."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    body_lines = function.end_lineno - body[0].lineno + 1
    return body_lines if is_kernel(function) else body_lines + function.body[0].lineno - function.lineno


def kernel_ops() -> list[str]:
    """Names of the files directly in kernels/ that define a Triton kernel, one op (or pair of ops) each."""
    files = [file for file in python_files("kernels") if file.parent == ROOT / "kernels"]
    with_kernel = [file.stem for file in files if any(is_kernel(function) for _, function in functions(file))]
    return sorted(with_kernel)


def is_public(name: str) -> bool:
    return not any(part.startswith("_") and part != "__init__" for part in name.split("."))


def parameters(function: ast.FunctionDef) -> list[str]:
    """Parameter names in order, without self and cls."""
    args = function.args
    listed = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    names = [arg.arg for arg in listed if arg is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def documented_parameters(docstring: str) -> list[str] | None:
    """Names in the `Args:` section of a Google-style docstring; None if there is no such section."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return None
    entries = re.findall(r"^ {4}([\w*, ]+?)(?: \([^)]*\))?:", section.group(1), re.MULTILINE)
    return [name.strip(" *") for entry in entries for name in entry.split(",")]


def anchors(markdown: str) -> set[str]:
    """The fragments that headings of a Markdown page can be linked by."""
    headings = re.findall(r"^#+ +(.+?) *#*$", markdown, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


# Rooms


def test_rooms_import_only_the_rooms_below_them():
    wrong = [
        f"{name_of(modules()[name])} ({room_of(modules()[name])}) imports {other} ({room_of(modules()[other])})"
        for name, others in arrows().items()
        for other in others
        if ROOMS.index(room_of(modules()[other])) > ROOMS.index(room_of(modules()[name]))
    ]
    assert not wrong, one_per_line(wrong)


def test_no_modules_import_each_other():
    left = {name: set(others) for name, others in arrows().items()}
    while free := {name for name in left if not left[name] & left.keys() or not any(name in o for o in left.values())}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left, one_per_line([f"{name} imports {sorted(others & left.keys())}" for name, others in left.items()])


def test_every_folder_is_a_room_that_says_what_belongs_in_it():
    assert {room_of(file) for file in modules().values()} == set(ROOMS)
    silent = [room for room in ROOMS if not ast.get_docstring(parsed(ROOT / room / "__init__.py"))]
    assert not silent, one_per_line(silent)


def test_the_installed_packages_are_the_rooms():
    packages = re.search(r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S).group(1)
    listed = {name.replace(".", "/") for name in re.findall(r'"([\w.]+)"', packages)}
    assert listed == {"specdec/" + room if not room.startswith("specdec") else room for room in ROOMS}


def test_no_room_is_crowded():
    counts = {room: sum(room_of(file) == room for file in modules().values()) - 1 for room in ROOMS}
    crowded = {room: count for room, count in counts.items() if count > MAX_MODULES and room not in ONE_MODULE_PER_OP}
    assert not crowded


def test_tests_stand_in_rooms_and_take_nothing_from_other_tests():
    files = python_files("tests")
    places = {file.parent.relative_to(ROOT / "tests").as_posix() for file in files}
    assert places - {".", "lib", "bench"} <= {room.removeprefix("specdec/") for room in ROOMS}
    names = {file.stem for file in files if file.name.startswith("test_")}
    wrong = [
        f"{name_of(file)} imports {module}"
        for file in files
        for module in imported_modules(parsed(file))
        if module.split(".")[0] in names
    ]
    assert not wrong, one_per_line(wrong)


def test_contributing_shows_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = [room for room in ROOMS if f"{room}/" not in text]
    assert not missing, one_per_line(missing)


def test_imports_name_the_installed_package():
    """`import kernels` or a relative import works by accident of the working directory, if at all."""
    wrong = [
        f"{name_of(file)} imports {module}"
        for file in python_files(*LAYERS, "tests")
        for module in imported_modules(parsed(file))
        if module.split(".")[0] in ("", "kernels", "models", "bench")
    ]
    assert not wrong, one_per_line(wrong)


def test_references_import_no_triton():
    files = [file for file in python_files("kernels") if "reference" in file.parts]
    wrong = [
        f"{name_of(file)} imports {module}"
        for file in files
        for module in imported_modules(parsed(file))
        if module.split(".")[0] == "triton" or module.startswith(tuple(f"specdec.kernels.{op}" for op in kernel_ops()))
    ]
    assert not wrong, one_per_line(wrong)


# Kernels


@pytest.mark.parametrize("op", kernel_ops())
def test_kernel_has_reference_test_benchmark_and_page(op):
    places = [
        f"kernels/reference/{op}.py",
        f"tests/kernels/test_{op}.py",
        f"bench/kernels/bench_{op}.py",
        f"docs/kernels/{op}.md",
    ]
    missing = [place for place in places if not (ROOT / place).is_file()]
    assert not missing, one_per_line(missing)


@pytest.mark.parametrize("op", kernel_ops())
def test_kernel_module_says_what_it_computes_and_where_that_comes_from(op):
    docstring = ast.get_docstring(parsed(ROOT / "kernels" / f"{op}.py")) or ""
    assert not [entry for entry in ("Equation:", "Source:", "Reference:", "Shapes:", "Cost:") if entry not in docstring]


def test_nothing_stands_beside_a_missing_kernel():
    """A reference, benchmark or page whose kernel was renamed or removed is dead weight."""
    beside = {
        "kernels/reference": {file.stem for file in (ROOT / "kernels" / "reference").glob("*.py")} - {"__init__"},
        "bench/kernels": {file.stem[6:] for file in (ROOT / "bench" / "kernels").glob("bench_*.py")},
        "docs/kernels": {file.stem for file in (ROOT / "docs" / "kernels").glob("*.md")} - {"README", "index"},
    }
    wrong = [f"{place}: {name}" for place, names in beside.items() for name in names - set(kernel_ops())]
    assert not wrong, one_per_line(wrong)


@pytest.mark.parametrize("op", kernel_ops())
def test_reference_has_the_signature_of_its_launchers(op):
    launchers = dict(functions(ROOT / "kernels" / f"{op}.py"))
    references = dict(functions(ROOT / "kernels" / "reference" / f"{op}.py"))
    public = {name for name in launchers if is_public(name) and "." not in name and not is_kernel(launchers[name])}
    assert op in public
    for name in public:
        assert name in references, f"kernels/reference/{op}.py lacks {name}"
        own = [parameter for parameter in parameters(launchers[name]) if parameter != "backend"]
        assert [parameter for parameter in parameters(references[name]) if parameter != "upcast"] == own, name


# Size, names, docstrings


def test_modules_and_functions_are_short():
    long = {}
    for file in python_files(*LAYERS, "tests"):
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MAX_MODULE_LINES:
            long[name_of(file)] = lines
        for name, function in functions(file):
            limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
            if (lines := num_lines(function)) > limit:
                long[f"{name_of(file)}::{name}"] = lines
    wrong = [f"{place}: {lines} lines" for place, lines in long.items() if place not in ARGUED_SIZES]
    assert not wrong, one_per_line(wrong)
    assert set(long) >= ARGUED_SIZES, "no longer too long: take it off the list"


def test_banned_names_are_absent():
    wrong = [
        f"{name_of(file)}:{number}: {line.strip()}"
        for file in text_files()
        if name_of(file) not in WHERE_BANNED_NAMES_ARE_EXPLAINED
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED.search(line)
    ]
    assert not wrong, one_per_line(wrong)


@pytest.mark.parametrize("layer", LAYERS)
def test_docstrings_list_the_parameters_that_the_function_has(layer):
    wrong = []
    for file in python_files(layer):
        for name, function in functions(file):
            documented = documented_parameters(ast.get_docstring(function) or "")
            if documented is not None and is_public(name) and documented != parameters(function):
                wrong.append(f"{name_of(file)}::{name}: documents {documented}, has {parameters(function)}")
    assert not wrong, one_per_line(wrong)


def test_no_file_names_a_path_of_one_machine():
    wrong = [
        f"{name_of(file)}:{number}: {line.strip()[:120]}"
        for file in text_files()
        if file.relative_to(ROOT).parts[0] != "tests"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong, one_per_line(wrong)


# Documents and tests


def test_links_between_documents_resolve():
    wrong = []
    for page in [file for file in project_files() if file.suffix == ".md"]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in MARKDOWN_LINK.findall(prose):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, fragment = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                wrong.append(f"{name_of(page)}: {link}")
            elif fragment and target.suffix == ".md" and fragment not in anchors(target.read_text(encoding="utf-8")):
                wrong.append(f"{name_of(page)}: {link} (no such heading)")
    assert not wrong, one_per_line(wrong)


def test_every_test_file_asserts_something():
    silent = []
    for file in [file for file in python_files("tests") if file.name.startswith("test_")]:
        tests = [function for name, function in functions(file) if name.split(".")[-1].startswith("test_")]
        checks = re.compile(r"\bassert|pytest\.(raises|warns)\b")
        if not any(checks.search(ast.unparse(node)) for test in tests for node in test.body):
            silent.append(name_of(file))
    assert not silent, one_per_line(silent)

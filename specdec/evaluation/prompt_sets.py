"""Questions by name: the sets that papers and engines measure on, fetched once, kept, and known by their hash.

| name | what | from | licence |
|---|---|---|---|
| `spec_bench` | Spec-Bench, 480 questions of 13 categories, some of two turns | hemingkx/Spec-Bench | Apache-2.0 |
| `mt_bench` | MT-Bench, 80 questions of 8 categories, of two turns | lm-sys/FastChat | Apache-2.0 |
| `humaneval` | HumanEval, 164 functions of Python to complete | openai/human-eval | MIT |
| `gsm8k` | GSM8K's test set, 1319 problems | openai/grade-school-math | MIT |
| `speed_bench` | SPEED-Bench's qualitative split, 880 questions, 11 categories | hub: nvidia/SPEED-Bench | its own |
| `bundled` | the tiny model's prompts, which ship | | |

The first four are files of GitHub repositories at one commit. SPEED-Bench needs the extra `data`; some rows there
are placeholders for texts of other data sets and are counted out. A file with all of them is what NVIDIA's
`prepare.py` (NeMo-Skills, dataset speed-bench) writes; its path is as good as a name.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from specdec.bundled.load import TINY_FOLDER
from specdec.common.fetching import FetchError, download, say
from specdec.common.files import cache_folder, file_sha256
from specdec.evaluation.prompts import Question, QuestionSet, read_question_set
from specdec.training.data.files import hub_name

__all__ = ["PUBLISHED_FILES", "PublishedFile", "all_questions", "find_questions", "known_names"]


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of questions that somebody publishes.

    Attributes:
        address: where it is.
        num_bytes: of the file.
        sha256: of the file, in hexadecimal digits.
    """

    address: str
    num_bytes: int
    sha256: str


def _github(path: str, num_bytes: int, sha256: str) -> PublishedFile:
    return PublishedFile(f"https://raw.githubusercontent.com/{path}", num_bytes, sha256)


PUBLISHED_FILES: Mapping[str, PublishedFile] = MappingProxyType(
    {
        "spec_bench": _github(
            "hemingkx/Spec-Bench/66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/question.jsonl",
            698_768,
            "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        ),
        "mt_bench": _github(
            "lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d/fastchat/llm_judge/data/mt_bench/question.jsonl",
            48_929,
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
        "humaneval": _github(
            "openai/human-eval/463c980b59e818ace59f6f9803cd92c749ceae61/data/HumanEval.jsonl.gz",
            44_877,
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
        "gsm8k": _github(
            "openai/grade-school-math/b0bb162abedc65e1fdd8e93ed090fd7598ee68bc/grade_school_math/data/test.jsonl",
            749_738,
            "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        ),
    }
)
"""Sets of questions by name."""

_HUB = {"speed_bench": "nvidia/SPEED-Bench/qualitative:test"}
_BUNDLED = "bundled"


def known_names() -> tuple[str, ...]:
    """Names that `find_questions` knows."""
    return (*PUBLISHED_FILES, *_HUB, _BUNDLED)


def find_questions(
    name_or_path: str | Path,
    *,
    home: Path | None = None,
    published: Mapping[str, PublishedFile] = PUBLISHED_FILES,
) -> QuestionSet:
    """The questions that a user asks for: of a file that is there, else of a known name, else of the hub.

    Args:
        name_or_path: a file, one of `known_names()`, or a data set of the hub as `owner/name[/configuration][:split]`.
        home: the cache; by default `specdec.common.files.cache_folder()`.
        published: files that go by a name.

    Raises:
        FileNotFoundError: it is none of these.
        ValueError: a file of another hash, or one that holds no questions; as `read_question_set`.
        RuntimeError: the file cannot be fetched, or the library of the hub is missing.
        OSError: the data set cannot be had, or there is no room on the disk.
    """
    name = str(name_or_path)
    if Path(name_or_path).is_file():
        return read_question_set(name_or_path)
    if name in published:
        file = _fetched(name, published[name], (cache_folder() if home is None else home) / "prompts")
        return replace(read_question_set(file, name), source=published[name].address)
    if name == _BUNDLED:
        return replace(read_question_set(TINY_FOLDER / "prompts.json", name), source=_BUNDLED)
    source = _HUB.get(name, name)
    if hub_name(source):
        say(f"{name}: reading {source} from the hub")  # without a network its library tries for half a minute
        return read_question_set(source, name)
    raise FileNotFoundError(
        f"prompts: expected a file, one of {', '.join(known_names())}, or a data set of the hub as owner/name:split, "
        f"got {name}, and there is no such file"
    )


def all_questions(sets: Sequence[QuestionSet]) -> list[Question]:
    """The questions of several sets, one behind the other, no two of the same name.

    With more than one set, the set's name stands before the question's, and is the category of those that have none.

    Raises:
        ValueError: a set comes twice.
    """
    if len(sets) == 1:
        return list(sets[0].questions)
    names = [one.name for one in sets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"prompts: expected each set once, got {', '.join(sorted(twice))} several times")
    return [
        replace(question, name=f"{one.name}/{question.name}", category=question.category or one.name)
        for one in sets
        for question in one.questions
    ]


def _fetched(name: str, published: PublishedFile, folder: Path) -> Path:
    """The file in the cache, fetched if it is not there or not whole; in no case anything half-written is left."""
    file = folder / (name + "".join(Path(published.address).suffixes[-2:]))
    if file.is_file() and file_sha256(file) == published.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as place:
        part = Path(place) / file.name
        try:
            text = f"{name}: fetching {published.address}"
            download(published.address, part, text=text, num_bytes=published.num_bytes)
        except FetchError as error:
            raise RuntimeError(
                f"{name}: expected its questions from {published.address}, got: {error}. Without a network, get that "
                f"file elsewhere, and pass its path to --prompts or put it at {file}"
            ) from error
        digest = file_sha256(part)
        if digest != published.sha256:
            raise ValueError(
                f"{name}: expected a file with sha256 {published.sha256} from {published.address}, got {digest}"
            )
        os.replace(part, file)
    return file

"""Trees as text: reading their JSON form, and drawing them. `specdec.trees.shape` holds the trees themselves."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.common.files import replace_file
from specdec.kernels.common.limits import MAX_NODES

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FORMAT_VERSION",
    "MAX_NODES",
    "MAX_RANK",
    "JsonFile",
    "check_keys",
    "draw_below",
    "parse_json",
    "read_children",
]

MAX_RANK = 2**31 - 1
"""Largest rank: ranks travel as int32."""

FORMAT_VERSION = 1
_RANK_PATH = re.compile(r"(0|[1-9][0-9]{0,9})(\.(0|[1-9][0-9]{0,9}))*")


class JsonFile(ABC):
    """What is saved as one JSON file."""

    __slots__ = ()

    @abstractmethod
    def to_json(self) -> str:
        """The text of the file."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Any, *, source: str = "file") -> "Self":
        """What `to_json` wrote, as a JSON reader returned it.

        Args:
            data: the file's content.
            source: where it came from, named by errors.

        Raises:
            ValueError: anything that `to_json` cannot have written; the message names the source and the field.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, in one step; missing folders are made."""
        replace_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Self":
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file; the message names the file and the field.
        """
        source = os.fspath(path)
        return cls.from_dict(parse_json(Path(path).read_bytes(), source), source=source)


def parse_json(text: str | bytes, source: str) -> Any:
    """Parse JSON in which no key is given twice; errors name the source."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in pairs:
            if key in data:
                raise ValueError(f"{key!r} is given twice")
            data[key] = value
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: expected JSON, got an error: {error}") from error


def check_keys(data: Any, keys: set[str], source: str) -> None:
    """Check that `data` is an object with exactly these keys and of this version."""
    if not isinstance(data, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(data).__name__}")
    for key in data:
        if key not in keys:
            raise ValueError(f"{source}: expected the keys {', '.join(sorted(keys))}, got the unknown key {key!r}")
    for key in sorted(keys):
        if key not in data:
            raise ValueError(f"{source}: expected the keys {', '.join(sorted(keys))}, got none called {key!r}")
    version = data["version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"{source}: version: expected {FORMAT_VERSION}, got {version!r}")


def read_children(children: Any, source: str) -> set[tuple[int, ...]]:
    """Rank paths of the nodes below the root that `children` describes (see `TreeShape.to_dict`)."""
    if not isinstance(children, Mapping):
        raise ValueError(f"{source}: expected a JSON object, got {type(children).__name__}")
    fields: dict[tuple[int, ...], str] = {}  # by the path that each entry is about
    paths: set[tuple[int, ...]] = {()}
    for key, value in children.items():
        if key != "root" and not (isinstance(key, str) and _RANK_PATH.fullmatch(key)):
            raise ValueError(f'{source}: expected "root" or a rank path such as "0.2" as key, got {key!r}')
        field = f"{source}.{key}"
        path = () if key == "root" else tuple(map(int, key.split(".")))
        fields[path] = field
        paths.update((*path, rank) for rank in _child_ranks(value, field))
        if len(paths) > MAX_NODES:
            raise ValueError(f"{field}: expected at most {MAX_NODES} nodes in all, root included, got more")
    for path, field in fields.items():
        if path not in paths:
            raise ValueError(f"{field}: expected a node of the tree as key, but no other entry has it as a child")
    return paths - {()}


def _child_ranks(value: Any, field: str) -> Sequence[int]:
    if type(value) is int and 0 < value < MAX_NODES:
        return range(value)
    if isinstance(value, list) and value and all(type(rank) is int and 0 <= rank <= MAX_RANK for rank in value):
        if len(set(value)) != len(value):
            raise ValueError(f"{field}: expected distinct ranks, got {value!r:.80}")
        return value
    wanted = f"the number of children, 1 to {MAX_NODES - 1}, or a list of their ranks"
    raise ValueError(f"{field}: expected {wanted}, got {value!r:.80}")


def draw_below(children: Sequence[range], rank: Sequence[int], node: int, indent: str) -> Iterator[str]:
    """Lines of the picture of everything under a node, given the children and the rank of every node."""
    branches = [child for child in children[node] if children[child]]
    leaves = [child for child in children[node] if not children[child]]
    for child in branches:
        label, end = str(rank[child]), child
        while len(children[end]) == 1:  # a chain takes one line
            end = children[end].start
            label += f" ─ {rank[end]}"
        ends_in_leaves = all(not children[below] for below in children[end])
        if ends_in_leaves and children[end]:
            label += f" ─ {_spans([rank[leaf] for leaf in children[end]])}"
        is_last = child == branches[-1] and not leaves
        yield f"{indent}{'└─' if is_last else '├─'} {label}"
        if not ends_in_leaves:
            yield from draw_below(children, rank, end, indent + ("   " if is_last else "│  "))
    if leaves:
        yield f"{indent}└─ {_spans([rank[leaf] for leaf in leaves])}"


def _spans(ranks: Sequence[int]) -> str:
    """Ranks of some siblings as text, `0, 3..9`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in spans)

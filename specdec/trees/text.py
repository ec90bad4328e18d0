"""Trees as text: reading their JSON form, and drawing them. `specdec.trees.shape` holds the trees themselves."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.kernels.common.limits import MAX_NODES

if TYPE_CHECKING:
    from specdec.trees.shape import TreeShape

__all__ = ["FORMAT_VERSION", "MAX_NODES", "MAX_RANK", "check_keys", "draw_below", "parse_json", "read_children"]

MAX_RANK = 2**31 - 1
"""Largest rank: ranks travel as int32."""

FORMAT_VERSION = 1
_RANK_PATH = re.compile(r"(0|[1-9][0-9]{0,9})(\.(0|[1-9][0-9]{0,9}))*")


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


def draw_below(shape: "TreeShape", node: int, indent: str) -> Iterator[str]:
    """Lines of the picture of everything under a node."""
    branches = [child for child in shape.children[node] if shape.children[child]]
    leaves = [child for child in shape.children[node] if not shape.children[child]]
    for child in branches:
        label, end = str(shape.rank[child]), child
        while len(shape.children[end]) == 1:  # a chain takes one line
            end = shape.children[end].start
            label += f" ─ {shape.rank[end]}"
        ends_in_leaves = all(not shape.children[below] for below in shape.children[end])
        if ends_in_leaves and shape.children[end]:
            label += f" ─ {_spans(shape, shape.children[end])}"
        is_last = child == branches[-1] and not leaves
        yield f"{indent}{'└─' if is_last else '├─'} {label}"
        if not ends_in_leaves:
            yield from draw_below(shape, end, indent + ("   " if is_last else "│  "))
    if leaves:
        yield f"{indent}└─ {_spans(shape, leaves)}"


def _spans(shape: "TreeShape", siblings: Sequence[int]) -> str:
    """Ranks of some siblings as text, `0, 3..9`."""
    spans: list[list[int]] = []
    for rank in (shape.rank[node] for node in siblings):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in spans)

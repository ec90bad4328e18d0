"""The folder that a trained drafter of any kind is saved to, and how it knows its target again.

    specdec.json        {"kind", "format": 2, "config": {...}, "target": {"vocab_size", "hidden_size", "fingerprint"}}
    model.safetensors   the network's state, in the dtype that it had
    tree.json           optional: the tree that it proposes when nobody names one

Weights trained for one target load into another of the same sizes without a word, and then guess nothing right. So the
folder remembers a few numbers of its target's input embedding.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from specdec.common.files import replace_folder
from specdec.models.networks.base import DraftNetwork
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RECORD", "TREE", "WEIGHTS", "DrafterRecord", "TargetRecord", "config_from", "embeds_like"]
__all__ += ["heads_like", "write_folder"]

RECORD = "specdec.json"
WEIGHTS = "model.safetensors"
TREE = "tree.json"
FORMAT = 2

_NUM_SAMPLES = 32
_NUM_ROWS = 256
_ROWS_AT_ONCE = 4096
# Casting to bfloat16 moves a number by up to 2^-9 of itself, to float16 by up to 2^-11, or by 2^-25 if it is tiny.
_RELATIVE_TOLERANCE = 2.0**-8
_ABSOLUTE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """What tells one target from another.

    Attributes:
        fingerprint: numbers of the input embedding, at places spread over rows and columns.
    """

    vocab_size: int
    hidden_size: int
    fingerprint: tuple[float, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target) -> "Self":
        """The record of a target; of one without data, on "meta", its sizes alone."""
        if target.device.type == "meta":
            return cls(target.vocab_size, target.hidden_size, ())
        values = _embedding_rows(target, _spread(_NUM_SAMPLES, target.model.get_input_embeddings().weight.shape[0]))
        samples = torch.arange(_NUM_SAMPLES)
        numbers = values[samples, samples * 37 % values.shape[1]].double().tolist()
        return cls(target.vocab_size, target.hidden_size, tuple(float(f"{number:.6g}") for number in numbers))

    def check(self, other: "TargetRecord", *, source: str, any_target: bool) -> None:
        """Raise ValueError if `other`, the target at hand, is not the one of this record.

        Args:
            other: the target at hand.
            source: what the error message calls the drafter.
            any_target: look at the sizes alone.
        """
        for name in ("vocab_size", "hidden_size"):
            expected, got = getattr(other, name), getattr(self, name)
            if expected != got:
                raise ValueError(f"drafter: expected {name} {expected} as the target's, got {got} in {source}")
        if any_target or len(self.fingerprint) != len(other.fingerprint):
            return
        ours, theirs = torch.tensor(self.fingerprint), torch.tensor(other.fingerprint)
        if not torch.allclose(ours, theirs, rtol=_RELATIVE_TOLERANCE, atol=_ABSOLUTE_TOLERANCE):
            raise ValueError(
                f"drafter: expected one trained for this target, but the target of {source} has the same sizes and "
                f"another embedding; load_drafter(..., any_target=True) loads it all the same"
            )


@torch.no_grad()
def embeds_like(target: Target, weight: torch.Tensor, *, every_row: bool = False) -> bool:
    """Whether `weight [V, C]` is the target's input embedding in any dtype, as far as some hundred rows or all tell."""
    if weight.shape[1] != target.hidden_size:
        return False
    rows = torch.arange(weight.shape[0]) if every_row else _spread(_NUM_ROWS, weight.shape[0])
    return all(_is_close(_embedding_rows(target, some), weight[some]) for some in rows.split(_ROWS_AT_ONCE))


@torch.no_grad()
def heads_like(target: Target, weight: torch.Tensor) -> bool:
    """Whether `weight [V, C]` is the target's LM head, as `embeds_like`."""
    rows, own = _spread(_NUM_ROWS, weight.shape[0]), target.model.get_output_embeddings().weight
    return own.shape == weight.shape and _is_close(own[rows.to(own.device)].cpu(), weight[rows])


def _is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours.double(), theirs.double(), rtol=_RELATIVE_TOLERANCE, atol=_ABSOLUTE_TOLERANCE)


def _spread(count: int, size: int) -> torch.Tensor:
    """[count] int64: indices below `size` from the first to the last, as far apart as can be."""
    return torch.arange(count) * (size - 1) // (count - 1)


def _embedding_rows(target: Target, rows: torch.Tensor) -> torch.Tensor:
    """Of the target's input embedding the rows `rows [n]`: [n, C], on the CPU."""
    embed = target.model.get_input_embeddings()
    rows = rows.to(embed.weight.device)
    # of a weight that is spread over processes, each has a part; the module gives whole rows
    return (embed.weight[rows] if target.sharding is None else embed(rows)).cpu()


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """Content of `specdec.json`."""

    kind: str
    config: dict[str, Any]
    target: TargetRecord

    def to_json(self) -> str:
        """The record as a file's text."""
        record = {"kind": self.kind, "format": FORMAT, "config": self.config, "target": asdict(self.target)}
        return json.dumps(record, indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> "Self":
        """Read a record.

        Raises:
            ValueError: no such record, or one of another version.
        """
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            kind, version = str(record["kind"]), record["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}: expected a JSON object with the keys 'kind' and 'format', got {error!r}"
            ) from error
        if version != FORMAT:
            raise ValueError(f"{file}: expected format {FORMAT}, got {version!r}")
        try:
            target = dict(record["target"])
            target["fingerprint"] = tuple(float(value) for value in target["fingerprint"])
            return cls(kind, dict(record["config"]), TargetRecord(**target))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}: expected 'config', and 'target' with 'vocab_size', 'hidden_size' and 'fingerprint', "
                f"got {error!r}"
            ) from error


def write_folder(
    folder: str | os.PathLike[str],
    *,
    record: DrafterRecord,
    network: DraftNetwork,
    tree: TreeShape | DynamicTree,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a folder that `load_drafter` reads, in one step: after an error the old folder is still there.

    Args:
        folder: replaced if it exists.
        record: content of `specdec.json`.
        network: its state is saved in the dtype that it has.
        tree: what it proposes unless told otherwise.
        texts: further files by name, such as a report of the training.
    """
    # safetensors takes no two names of one memory, and networks may share a module between places
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    files = {RECORD: record.to_json(), TREE: tree.to_json(), **(texts or {})}
    with replace_folder(folder) as staging:
        save_file(tensors, staging / WEIGHTS)
        staging.joinpath(WEIGHTS).chmod(0o644)  # safetensors makes it private
        for name, text in files.items():
            staging.joinpath(name).write_text(text, encoding="utf-8")


def config_from(config_class: type, data: Mapping[str, Any], *, source: str) -> Any:
    """An instance of a network's configuration class from what JSON made of it; fields that it once had are left out.

    Raises:
        ValueError: fields missing, unknown or out of range; the message names them and `source`.
    """
    data = {name: value for name, value in data.items() if name not in getattr(config_class, "retired", ())}
    known = {field.name: field for field in fields(config_class)}
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    missing, unknown = sorted(required - data.keys()), sorted(data.keys() - known.keys())
    if missing or unknown:
        raise ValueError(f"{source}: missing fields {missing}, unknown fields {unknown} of {config_class.__name__}")
    try:
        if hasattr(config_class, "from_dict"):
            return config_class.from_dict(dict(data))
        return config_class(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error

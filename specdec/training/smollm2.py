"""`specdec train-smollm2`: the drafters of the chat model, in one resumable run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.bundled.load import SMOLLM2_FOLDER
from specdec.models.target.target import Target
from specdec.training.bundled_drafters import BundledDrafter, missing_parts, train_bundled_drafter
from specdec.training.data import Texts
from specdec.training.runs.probe import TauProbe
from specdec.training.smollm2_drafters import SMOLLM2_DRAFTERS

__all__ = ["SMOLLM2_TEXTS", "train_smollm2"]

SMOLLM2_TEXTS = SMOLLM2_FOLDER / "texts.jsonl.gz"
"""A million tokens that the target wrote; docs/training.md says about what, and how others are written."""


def train_smollm2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    work_dir: Path,
    *,
    only: Sequence[str] | None = None,
    data: Path | None = None,
    drafters: Mapping[str, BundledDrafter] = SMOLLM2_DRAFTERS,
    max_length: int = 320,
    held_out: float = 0.02,
    seed: int = 0,
    probe: TauProbe | None = None,
) -> dict[str, dict[str, float]]:
    """Train the drafters of the chat model that are not in `output` yet; delete the folder of one to redo it.

    Args:
        model: the target, in float32 or bfloat16.
        tokenizer: its tokenizer.
        output: receives a folder per drafter, each in one step once it is done.
        work_dir: checkpoints, and what the target says about the texts, which all drafters share; a run that was
            stopped goes on from them.
        only: drafters to train, by name; all by default.
        data: texts to learn from, as for `specdec train`; by default those that ship, which the target wrote.
        drafters: how the drafters are made.
        max_length: tokens at which texts are cut off.
        held_out: part of the texts that is evaluated on.
        seed: of what is held out, of the order of the texts and of all noise.
        probe: how tau is measured.

    Returns:
        Per drafter that was trained, its report (held-out loss, sizes, tau).

    Raises:
        FileNotFoundError: no such data, or a drafter that another one begins with is not there.
        ValueError: `only` names a drafter that does not exist, or malformed data.
    """
    wanted = missing_parts([*drafters], only, output)
    if not wanted:
        return {}
    if data is not None and not data.exists():
        raise FileNotFoundError(f"data: expected a file of texts, got {data}, which is not there")
    target = Target(model)
    # texts that ship are token ids, of which nothing is to be kept beside them
    source, words = (SMOLLM2_TEXTS, None) if data is None else (data, tokenizer)
    texts = Texts(source, held_out, words, max_length)
    probe = TauProbe(num_prompts=8, new_tokens=48) if probe is None else probe
    reports = {}
    for name in wanted:
        reports[name] = train_bundled_drafter(
            drafters[name],
            target,
            texts,
            output / name,
            work_dir / name,
            probe=probe,
            states=work_dir / "states",
            seed=seed,
        )
    return reports

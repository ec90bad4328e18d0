"""`specdec train-smollm2`: the texts of the chat model, then its drafters, in one resumable run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.models.target.target import Target
from specdec.training.bundled_drafters import BundledDrafter, missing_parts, train_bundled_drafter
from specdec.training.data import Texts
from specdec.training.distill import SelfPrompts, distill
from specdec.training.runs.probe import TauProbe
from specdec.training.smollm2_drafters import SMOLLM2_DRAFTERS, Smollm2Texts

__all__ = ["train_smollm2"]


def train_smollm2(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    work_dir: Path,
    *,
    only: Sequence[str] | None = None,
    data: Path | None = None,
    texts_recipe: Smollm2Texts | None = None,
    drafters: Mapping[str, BundledDrafter] = SMOLLM2_DRAFTERS,
    probe: TauProbe | None = None,
) -> dict[str, dict[str, float]]:
    """Train the drafters of the chat model that are not in `output` yet; delete the folder of one to redo it.

    Args:
        model: the target, in float32 or bfloat16.
        tokenizer: its tokenizer.
        output: receives a folder per drafter, each in one step once it is done, and `texts.jsonl`.
        work_dir: checkpoints, and what the target says about the texts, which all drafters share; a run that was
            stopped goes on from them.
        only: drafters to train, by name; all by default.
        data: texts to learn from, as for `specdec train`; by default the target writes them, about questions that it
            asks itself, to `output/texts.jsonl`.
        texts_recipe: how much it writes, and how texts are read.
        drafters: how the drafters are made.
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
    target, amount = Target(model), Smollm2Texts() if texts_recipe is None else texts_recipe
    if data is None:
        data = output / "texts.jsonl"
        distill(
            target,
            tokenizer,
            None,
            data,
            self_prompts=SelfPrompts(amount.num_prompts),
            max_new_tokens=amount.max_new_tokens,
            temperatures=amount.temperatures,
            batch_size=amount.batch_size,
            seed=amount.seed,
        )
    texts = Texts(data, amount.held_out, tokenizer, amount.max_length)
    probe = TauProbe(num_prompts=16, new_tokens=64) if probe is None else probe
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
            seed=amount.seed,
        )
    return reports

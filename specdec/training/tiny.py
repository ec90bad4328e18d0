"""`specdec train-tiny`: the bundled target, then its drafters, in one resumable run."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.training.corpus import Corpus, read_standard_library
from specdec.training.tiny_drafters import (
    DrafterRecipe,
    train_tiny_draft_model,
    train_tiny_medusa,
    write_with_target,
)
from specdec.training.tiny_target import TinyTargetRecipe, train_tiny_target

__all__ = ["train_tiny"]


def train_tiny(
    output: Path,
    work_dir: Path,
    *,
    target_recipe: TinyTargetRecipe | None = None,
    drafter_recipe: DrafterRecipe | None = None,
    corpus: Corpus | None = None,
) -> dict[str, dict[str, float]]:
    """Train everything that the package bundles.

    A part that is already in `output` is not trained again; delete its folder to redo it.

    Args:
        output: receives `target/`, `medusa/` and `draft_model/`, each in one step once it is done.
        work_dir: checkpoints and the text that the target wrote; a run that was stopped goes on from them.
        target_recipe: sizes and schedule of the target.
        drafter_recipe: sizes and schedule of the drafters.
        corpus: training text; the Python standard library by default.

    Returns:
        Per part that was trained, its report (held-out loss and sizes).
    """
    drafter_recipe = DrafterRecipe() if drafter_recipe is None else drafter_recipe
    corpus = read_standard_library() if corpus is None else corpus
    reports: dict[str, dict[str, float]] = {}
    if not (output / "target").exists():
        recipe = TinyTargetRecipe() if target_recipe is None else target_recipe
        reports["target"] = train_tiny_target(output / "target", work_dir / "target", recipe, corpus)
    target = LlamaForCausalLM.from_pretrained(output / "target", dtype=torch.float32).eval()
    written = work_dir / "texts.pt"
    if written.exists():
        texts = torch.load(written, weights_only=True)
    else:
        texts = write_with_target(target, AutoTokenizer.from_pretrained(output / "target"), drafter_recipe, corpus)
        written.parent.mkdir(parents=True, exist_ok=True)
        torch.save(texts, written)
    if not (output / "medusa").exists():
        reports["medusa"] = train_tiny_medusa(target, texts, output / "medusa", work_dir / "medusa", drafter_recipe)
    if not (output / "draft_model").exists():
        reports["draft_model"] = train_tiny_draft_model(
            target, texts, output / "draft_model", work_dir / "draft_model", drafter_recipe
        )
    return reports

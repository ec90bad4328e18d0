"""`specdec train-tiny`: the bundled target, then its drafters, in one resumable run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.training.bundled_drafters import BundledDrafter, missing_parts, train_bundled_drafter
from specdec.training.corpus import Corpus, read_standard_library
from specdec.training.data import Sample, Texts
from specdec.training.runs.probe import TauProbe
from specdec.training.tiny_drafters import TINY_DRAFTERS, TinyTexts, write_texts
from specdec.training.tiny_target import TinyTargetRecipe, train_tiny_target

__all__ = ["train_tiny"]


def train_tiny(
    output: Path,
    work_dir: Path,
    *,
    only: Sequence[str] | None = None,
    target_recipe: TinyTargetRecipe | None = None,
    texts_recipe: TinyTexts | None = None,
    drafters: Mapping[str, BundledDrafter] = TINY_DRAFTERS,
    corpus: Corpus | None = None,
) -> dict[str, dict[str, float]]:
    """Train everything that the package bundles.

    A part that is already in `output` is not trained again; delete its folder to redo it.

    Args:
        output: receives `target/` and a folder per drafter, each in one step once it is done.
        work_dir: checkpoints and the texts that the target wrote; a run that was stopped goes on from them.
        only: parts to train, by the names of their folders; all by default.
        target_recipe: sizes and schedule of the target.
        texts_recipe: how much the target writes.
        drafters: how the drafters are made.
        corpus: training text; the Python standard library by default.

    Returns:
        Per part that was trained, its report (held-out loss, sizes, tau).

    Raises:
        FileNotFoundError: drafters are asked for, and no target is there.
        ValueError: `only` names a part that does not exist.
    """
    parts = ["target", *drafters]
    wanted = missing_parts(parts, only, output)
    if not wanted:
        return {}
    corpus = read_standard_library() if corpus is None else corpus
    reports: dict[str, dict[str, float]] = {}
    if "target" in wanted:
        recipe = TinyTargetRecipe() if target_recipe is None else target_recipe
        reports["target"] = train_tiny_target(output / "target", work_dir / "target", recipe, corpus)
        wanted.remove("target")
    if not wanted:
        return reports
    if not (output / "target").exists():
        raise FileNotFoundError(f"output: expected the target in {output / 'target'}, got none; train it first")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM.from_pretrained(output / "target", dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "target")
    amount = TinyTexts() if texts_recipe is None else texts_recipe
    texts = write_texts(model, tokenizer, corpus.train, amount, amount.num_texts, work_dir / "texts.pt")
    held_out = write_texts(model, tokenizer, corpus.held_out, amount, amount.num_held_out, work_dir / "held_out.pt")
    own_part = torch.arange(amount.window) >= amount.prompt_tokens
    data = Texts(
        [Sample(text, torch.ones_like(own_part)) for text in texts], [Sample(text, own_part) for text in held_out]
    )
    probe = TauProbe(num_prompts=16, prompt_tokens=amount.prompt_tokens, new_tokens=64)
    for name in wanted:
        reports[name] = train_bundled_drafter(drafters[name], model, data, output / name, work_dir / name, probe=probe)
    return reports

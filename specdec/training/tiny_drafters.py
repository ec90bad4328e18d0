"""The drafters of the tiny target, trained on text that the target itself wrote (self-distillation).

A drafter has to guess the target, not the data, so the target continues pieces of its training files at several
temperatures, and the drafters learn from the result. They go through the same `train_drafter` as any other; learning
rates and lengths fit a small network and a few minutes, everything else is the papers' recipe. Labels are the target's
own most probable tokens, which is what greedy decoding asks a drafter for: with so small a target, sampled text holds
too much chance to learn from.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from specdec.models.target.target import Target
from specdec.training.bundled_drafters import BundledDrafter
from specdec.training.corpus import TokenWindows
from specdec.training.distill import continue_prompts

__all__ = ["TINY_DRAFTERS", "TinyTexts", "write_texts"]

# What the demo uses on a CPU, where every node costs: a wide first level and the likely nodes below it.
_SHALLOW = ((0,), (1,), (2,), (3,), (4,), (5,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
_DEEP = (*_SHALLOW[:4], *_SHALLOW[6:], (0, 0, 1), (0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class TinyTexts:
    """How much the target writes.

    Attributes:
        num_texts: texts to learn from.
        num_held_out: texts to evaluate on, which continue files that the target has not seen.
        prompt_tokens: real tokens at the beginning of each.
        window: tokens of each.
        temperatures: batches of texts take them in turn.
        batch_size: texts written at a time.
    """

    num_texts: int = 4096
    num_held_out: int = 32
    prompt_tokens: int = 48
    window: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6)
    batch_size: int = 128
    seed: int = 0


_DRAFT_MODEL = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
# an LM head of each head's own would be most of what these drafters weigh
_HYDRA = {"num_heads": 3, "vocab_size": None}
_EAGLE3 = {"tap_layers": (1, 2, 4), "draft_vocab_size": 1024, "num_unrolled": 4}
_PEAGLE = {"tap_layers": (1, 2, 4), "num_masks": 4, "shares_lm_head": True}
# attention from scratch takes more steps than there is time for: the layers begin as the target's own
_DFLASH = {
    **{"tap_layers": (1, 3, 4), "block_size": 8, "num_layers": 2, "num_anchors": 32},
    **{"start_layers": (4, 5), "qk_norm": False},
}
_DSPARK = {**_DFLASH, "block_size": 7, "num_anchors": 24, "markov_rank": 64}
TINY_DRAFTERS: dict[str, BundledDrafter] = {
    "draft_model": BundledDrafter("draft_model", 1500, 3e-3, None, _DRAFT_MODEL),
    "medusa": BundledDrafter("medusa", 900, 2e-3, _SHALLOW, {"num_heads": 3}),
    "hydra": BundledDrafter("hydra", 600, 1e-3, _SHALLOW, _HYDRA),
    # dropout helps over the paper's ten epochs; in a tenth of one it only slows learning
    "hydra++": BundledDrafter("hydra++", 800, 1e-3, _SHALLOW, {**_HYDRA, "shared_tail": True, "dropout": 0.0}),
    "eagle": BundledDrafter("eagle", 1200, 3e-3, _DEEP),
    # in float32: without AMX, bfloat16 takes nearly twice as long on a CPU
    "mtp": BundledDrafter(
        "mtp", 320, 3e-3, _DEEP, {"num_unrolled": 3, "teacher_weight": 1.0}, run={"mixed_precision": None}
    ),
    "eagle3": BundledDrafter("eagle3", 400, 3e-3, _DEEP, _EAGLE3),
    "amphista": BundledDrafter("amphista", 800, 1e-3, _SHALLOW, {"num_heads": 4, "head_rank": 64}),
    # masks at some groups only: more texts in the same time. Two masks: next to nothing was accepted beyond
    "parallelspec": BundledDrafter(
        "parallelspec", 1000, 2e-3, _SHALLOW, {"variant": "eagle", "num_masks": 2, "num_groups": 64}, eagle="eagle"
    ),
    "parallelspec_medusa": BundledDrafter(
        "parallelspec", 1100, 3e-3, _SHALLOW, {"variant": "medusa", "num_masks": 2, "num_groups": 48}
    ),
    # without dropout for the reason given above
    "falcon": BundledDrafter("falcon", 700, 3e-3, _SHALLOW, {"block_size": 2, "lstm_dropout": 0.0}),
    "dflash": BundledDrafter("dflash", 1000, 1e-3, _DEEP, _DFLASH, 4),
    "peagle": BundledDrafter("peagle", 600, 2e-3, _DEEP, _PEAGLE, 4),
    "dspark": BundledDrafter("dspark", 900, 1e-3, _DEEP, _DSPARK, 4),
}
"""The bundled drafters, by the name of their folder."""


def write_texts(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[str],
    recipe: TinyTexts,
    num_texts: int,
    file: Path,
) -> torch.Tensor:
    """Let the target continue the beginnings of random windows of `documents`.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        documents: where the beginnings come from.
        recipe: lengths and temperatures.
        num_texts: how many to write; fewer if the documents have fewer windows.
        file: keeps what was written; if it exists, it is read and nothing is written.

    Returns:
        [num_texts, window] int64: `prompt_tokens` of real text, the rest the target's own.
    """
    if file.exists():
        return torch.load(file, weights_only=True)
    generator = torch.Generator().manual_seed(recipe.seed)
    windows = TokenWindows(documents, tokenizer, recipe.window).windows
    chosen = windows[torch.randperm(len(windows), generator=generator)[:num_texts], : recipe.prompt_tokens]
    target, new = Target(model), recipe.window - recipe.prompt_tokens
    texts = []
    for index, prompts in enumerate(track(chosen.split(recipe.batch_size), description="the target writes")):
        continuations = continue_prompts(
            target,
            list(prompts),
            new,
            temperature=recipe.temperatures[index % len(recipe.temperatures)],
            seeds=[recipe.seed + index * recipe.batch_size + row for row in range(len(prompts))],
            min_new_tokens=new,
        )
        texts.append(torch.cat((prompts, torch.tensor(continuations)), 1))
    written = torch.cat(texts)[torch.randperm(len(chosen), generator=generator)]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(written, partial)
    os.replace(partial, file)
    return written

"""The drafters of the tiny target, trained on text that the target itself wrote (self-distillation).

A drafter has to guess the target, not the data, so the target continues pieces of its training files at several
temperatures, and the drafters learn from the result.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch users know
from rich.progress import track
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from specdec.checkpoints import save_medusa
from specdec.files import replace_folder
from specdec.models.medusa import MedusaConfig, MedusaHeads
from specdec.training.corpus import Corpus, TokenWindows
from specdec.training.recipes import run_training
from specdec.trees import TreeShape

__all__ = ["DrafterRecipe", "train_tiny_draft_model", "train_tiny_medusa", "write_with_target"]

# What the demo uses on a CPU, where every node costs: a wide first level and the likely nodes below it.
_MEDUSA_TREE = [[0], [1], [2], [3], [4], [5], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """How much the target writes and how long the drafters learn."""

    num_texts: int = 2048
    prompt_tokens: int = 48
    window: int = 256
    temperatures: tuple[float, ...] = (0.2, 0.5, 0.8)
    medusa_heads: int = 4
    medusa_steps: int = 1200
    draft_hidden_size: int = 128
    draft_layers: int = 2
    draft_steps: int = 1500
    batch_size: int = 8
    seed: int = 0


class _Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return self.windows.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def write_with_target(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    recipe: DrafterRecipe,
    corpus: Corpus,
    *,
    batch_size: int = 128,
) -> torch.Tensor:
    """Let the target continue the beginnings of random windows of its training text.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        recipe: how much to write.
        corpus: where the beginnings come from.
        batch_size: texts written at a time.

    Returns:
        [num_texts, window] int64: `prompt_tokens` of real text, the rest the target's own.
    """
    torch.manual_seed(recipe.seed)
    windows = TokenWindows(corpus.train, tokenizer, recipe.window).windows
    chosen = windows[torch.randperm(len(windows))[: recipe.num_texts], : recipe.prompt_tokens]
    texts = []
    for index, prompts in enumerate(track(chosen.split(batch_size), description="the target writes")):
        texts.append(
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=recipe.temperatures[index % len(recipe.temperatures)],
                top_k=0,
                min_new_tokens=recipe.window - recipe.prompt_tokens,
                max_new_tokens=recipe.window - recipe.prompt_tokens,
            )
        )
    return torch.cat(texts)[torch.randperm(sum(map(len, texts)))]


class _MedusaTraining(nn.Module):
    """Frozen target and heads; `forward` gives the loss of Medusa-1: cross-entropy summed over the heads.

    The labels are not those passed but the target's own most probable tokens, which is what greedy decoding asks the
    heads for: with so small a target, sampled text holds too much chance to learn from.
    """

    def __init__(self, target: LlamaForCausalLM, heads: MedusaHeads) -> None:
        super().__init__()
        self._frozen = (target,)  # in a tuple it is no submodule: checkpoints hold the heads alone
        self.heads = heads

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ARG002
        with torch.no_grad():
            target = self._frozen[0].to(input_ids.device)
            hidden = target.model(input_ids).last_hidden_state
            tokens = target.lm_head(hidden).argmax(-1)  # at position t the token after t
        count = self.heads.config.num_heads
        usable = input_ids.shape[1] - count
        logits = self.heads(hidden[:, :usable].flatten(0, 1).float())  # [B * T, K, V]
        wanted = torch.stack([tokens[:, head + 1 : head + 1 + usable] for head in range(count)], -1)
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())}


def train_tiny_medusa(
    target: LlamaForCausalLM, texts: torch.Tensor, output: Path, work_dir: Path, recipe: DrafterRecipe
) -> dict[str, float]:
    """Train Medusa heads and save them, with the demo's tree, to `output`.

    Returns:
        `held_out_loss`, mean over the heads, in nats.
    """
    heads = MedusaHeads(MedusaConfig(target.config.hidden_size, target.config.vocab_size, recipe.medusa_heads))
    heads.start_from(target.get_output_embeddings().weight)
    torch.manual_seed(recipe.seed)
    metrics = run_training(
        _MedusaTraining(target, heads),
        work_dir,
        train=_Windows(texts[recipe.batch_size * 4 :]),
        held_out=_Windows(texts[: recipe.batch_size * 4]),
        batch_size=recipe.batch_size,
        num_steps=recipe.medusa_steps,
        learning_rate=2e-3,
        warmup_steps=recipe.medusa_steps // 20,
        weight_decay=0.0,
        seed=recipe.seed,
    )
    save_medusa(heads.half(), output, tree=TreeShape.from_paths(_MEDUSA_TREE))
    return {"held_out_loss": metrics["eval_loss"]}


def train_tiny_draft_model(
    target: LlamaForCausalLM, texts: torch.Tensor, output: Path, work_dir: Path, recipe: DrafterRecipe
) -> dict[str, float]:
    """Train a smaller LLaMA on the target's text and save it to `output`.

    Returns:
        `held_out_loss` in nats per token, `num_parameters`.
    """
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=recipe.draft_hidden_size,
        intermediate_size=recipe.draft_hidden_size * 11 // 4,
        num_hidden_layers=recipe.draft_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=target.config.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
        pad_token_id=target.config.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    metrics = run_training(
        model,
        work_dir,
        train=_Windows(texts[recipe.batch_size * 4 :]),
        held_out=_Windows(texts[: recipe.batch_size * 4]),
        batch_size=recipe.batch_size,
        num_steps=recipe.draft_steps,
        learning_rate=3e-3,
        warmup_steps=recipe.draft_steps // 20,
        seed=recipe.seed,
    )
    report = {
        "held_out_loss": metrics["eval_loss"],
        "num_parameters": float(sum(p.numel() for p in model.parameters())),
    }
    model.config.use_cache = True  # the trainer turns it off
    with replace_folder(output) as folder:
        model.half().save_pretrained(folder)
        record = {"recipe": asdict(recipe), "report": report}
        folder.joinpath("training.json").write_text(json.dumps(record, indent=2) + "\n")
    return report

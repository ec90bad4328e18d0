"""The bundled tiny target: a small LLaMA trained on the Python standard library.

The recipe reruns with `specdec train-tiny` on two CPU cores in under an hour; an interrupted run resumes.
"""

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.common.files import replace_folder
from specdec.training.corpus import Corpus, TokenWindows, train_tokenizer
from specdec.training.objectives.recipe import Recipe, Run
from specdec.training.runs.batches import Reading
from specdec.training.runs.trainer import forget_checkpoints, run_training

__all__ = ["TinyTargetRecipe", "train_tiny_target"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TinyTargetRecipe:
    """Everything that decides the tiny target, so that the same recipe gives the same model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    context: int = 1024
    window: int = 512
    batch_size: int = 8
    num_steps: int = 3000
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    seed: int = 0

    def config(self, end_of_text: int) -> LlamaConfig:
        """The architecture as a Hugging Face configuration."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )


def train_tiny_target(output: Path, work_dir: Path, recipe: TinyTargetRecipe, corpus: Corpus) -> dict[str, float]:
    """Train the tokenizer and the target, and save both in half precision.

    Args:
        output: folder that receives model, tokenizer and `training.json`; replaced only once training is done.
        work_dir: checkpoints of the run; when it already holds some, training resumes from the last.
        recipe: sizes and schedule.
        corpus: training and held-out text.

    Returns:
        `held_out_loss` (nats per token), `held_out_perplexity`, `num_parameters`, `characters_per_token`.
    """
    tokenizer = train_tokenizer(corpus.train, recipe.vocab_size, recipe.context)
    train = TokenWindows(corpus.train, tokenizer, recipe.window)
    held_out = TokenWindows(corpus.held_out, tokenizer, recipe.window)
    logger.info(
        "corpus: %d training windows and %d held-out windows of %d tokens", len(train), len(held_out), recipe.window
    )

    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config(tokenizer.eos_token_id))
    metrics, _ = run_training(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        work_dir,
        recipe=Recipe(
            learning_rate=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            final_lr_ratio=0.05,
            warmup_ratio=recipe.warmup_steps / recipe.num_steps,
            batch_size=recipe.batch_size,
        ),
        run=Run(steps=recipe.num_steps, eval_every=min(250, recipe.num_steps), log_every=50, seed=recipe.seed),
        train=train,
        held_out=held_out,
        reading=Reading(default_collate, num_tokens=lambda window: window["input_ids"].shape[0]),
        mixed_precision=True,
    )
    loss = metrics["eval_loss"]
    report = {
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
        "num_parameters": float(sum(p.numel() for p in model.parameters())),
        "characters_per_token": sum(map(len, corpus.held_out)) / held_out.windows.numel(),
    }
    model.config.use_cache = True  # the trainer turns it off
    with replace_folder(output) as folder:
        model.to(torch.float16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        record = {"recipe": asdict(recipe), "report": report}
        folder.joinpath("training.json").write_text(json.dumps(record, indent=2) + "\n")
    forget_checkpoints(work_dir)
    return report

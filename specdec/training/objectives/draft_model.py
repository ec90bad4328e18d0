"""What a draft model learns: to write as the target does.

Equation:   loss = mean over t of  a CE(q_t, label_{t+1}) + b CE(q_t, p_t)
            q and p: laws of the next token by the draft model and by the target
Source:     a = 1, b = 0 is a language model's training on (self-distilled) text; b is the distillation of DistillSpec
            (arXiv:2310.08461), with the forward divergence on given text. Multi-candidate decoding (arXiv:2401.06706)
            takes draft models that were trained from scratch and, in section 5, fine-tunes them on conversations
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.drafters.draft_model import DraftModel
from specdec.models.target.families import is_decoder_and_head
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.recipe import Recipe, check_weights
from specdec.trees.shape import TreeShape

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FINE_TUNING", "FROM_SCRATCH", "DraftModelObjective"]

# a small LLaMA's usual settings; the papers take their draft models as others have trained them
FROM_SCRATCH = Recipe(learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1, final_lr_ratio=0.05, warmup_ratio=0.05)
# section 5 of the multi-candidate paper follows Vicuna's setup, which is FastChat's: its README and training script
FINE_TUNING = Recipe(learning_rate=2e-5, warmup_ratio=0.03, epochs=3, batch_size=128)


class DraftModelObjective(Objective):
    """Loss of a draft model.

    Args:
        network: the draft model.
        target: the frozen target.
        lm_weight: a, of the cross-entropy with the labels.
        teacher_weight: b, of the cross-entropy with the target's distribution.

    Raises:
        ValueError: a negative weight, or both zero.
    """

    recipe: Recipe = FROM_SCRATCH
    network: PreTrainedModel  # no DraftNetwork: saved as transformers does

    def __init__(
        self, network: PreTrainedModel, target: Target, *, lm_weight: float = 1.0, teacher_weight: float = 0.0
    ) -> None:
        super().__init__(network, target)
        check_weights({"lm_weight": lm_weight, "teacher_weight": teacher_weight})
        self.lm_weight = lm_weight
        self.teacher_weight = teacher_weight

    @classmethod
    def new(cls, target: Target, **settings: Any) -> "Self":
        """As any objective; a trained `model` is fine-tuned by a recipe of its own."""
        objective = super().new(target, **settings)
        if settings.get("model") is not None:
            objective.recipe = FINE_TUNING
        return objective

    @classmethod
    def new_network(cls, target: Target, *, model: str | None = None, **settings: Any) -> PreTrainedModel:
        """A new small LLaMA of the target's vocabulary, or a trained model to go on with.

        Args:
            target: the frozen target.
            model: folder or hub id of a causal LM to start from.
            settings: without `model`, fields of `LlamaConfig`; by default a quarter of the target's width and two
                layers.

        Raises:
            TypeError: a setting that `LlamaConfig` does not have, or any beside `model`.
        """
        if model is not None:
            if settings:
                raise TypeError(f"{next(iter(settings))}: expected no sizes beside model, which has its own")
            return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return LlamaForCausalLM(_config(target, settings))

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and those of its parts `"lm"` and `"teacher"` that count."""
        learnt = batch.loss_mask[:, 1:]
        logits = self._logits(batch, learnt)
        parts = {}
        if self.lm_weight:
            parts["lm"] = mean_cross_entropy(logits, batch.vocabulary.labels(batch.labels[:, 1:][learnt]))
        if self.teacher_weight:
            parts["teacher"] = mean_cross_entropy(logits, batch.law(slice(-1), learnt))
        weights = {"lm": self.lm_weight, "teacher": self.teacher_weight}
        loss = sum((weights[name] * part for name, part in parts.items()), start=logits.new_zeros(()))
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}

    def _logits(self, batch: TrainingBatch, learnt: torch.Tensor) -> torch.Tensor:
        """[N, n] logits of the draft model at the places before the `learnt [B, T - 1]` tokens."""
        inputs = {"input_ids": batch.tokens, "use_cache": False}
        if not is_decoder_and_head(self.network):
            logits = self.network(**inputs).logits[:, :-1][learnt]
            tokens = batch.vocabulary.tokens
            return batch.vocabulary.weighted(logits if tokens is None else logits[:, tokens])
        states = self.network.get_decoder()(**inputs)[0][:, :-1][learnt]
        head = self.network.get_output_embeddings()
        return self.logits(batch, states, head.weight, head.bias)

    def drafter(self, shape: Any = None) -> Any:
        """A drafter around the model as it is now."""
        return DraftModel(self.network, TreeShape.from_k_config((4, 2, 2)) if shape is None else shape)


def _config(target: Target, settings: dict[str, Any]) -> LlamaConfig:
    """Sizes of a new draft model."""
    own = target.model.config.get_text_config(decoder=True)
    unknown = settings.keys() - LlamaConfig().to_dict().keys()
    if unknown:
        raise TypeError(f"{min(unknown)}: LlamaConfig has no such field")
    width = settings.get("hidden_size", max(64, target.hidden_size // 4))
    heads = settings.get("num_attention_heads", max(1, width // 64))
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": True,
        "bos_token_id": own.bos_token_id,
        "eos_token_id": own.eos_token_id,
        "pad_token_id": own.pad_token_id,
    }
    return LlamaConfig(**{**sizes, **settings})

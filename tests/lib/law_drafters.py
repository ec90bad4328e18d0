"""A target of seven tokens, and a drafter of every kind for it: random networks, right often enough by chance."""

from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.drafters.draft_model import DraftModel
from specdec.drafters.lookahead import Lookahead
from specdec.drafters.prompt_lookup import PromptLookup
from specdec.models.target.target import Target
from specdec.training.objectives.amphista import AmphistaObjective
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.falcon import FalconObjective
from specdec.training.objectives.hydra import HydraObjective
from specdec.training.objectives.medusa import MedusaObjective
from specdec.training.objectives.parallelspec import ParallelSpecObjective
from specdec.trees.shape import TreeShape

VOCAB_SIZE = 7
_TREE = TreeShape.from_k_config((3, 2))


@lru_cache
def build_target(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A random model whose laws are neither flat nor sure."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(vocab_size=vocab_size, **sizes, **heads, initializer_range=0.25, **no_tokens)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def _trained(objective, shape, **settings):
    def make():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            made = objective.new(Target(build_target()), **settings)
            with torch.no_grad():
                for parameter in made.network.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
        return made.drafter(shape)

    return make


DRAFTERS = {
    "none": lambda: None,
    "prompt_lookup": lambda: PromptLookup(max_ngram=2, num_draft_tokens=3),
    "lookahead": lambda: Lookahead(level=3, window=3, guesses=2),
    # vocabularies may be padded differently: one has a token more than the target, one lacks the target's last
    "draft_chain": lambda: DraftModel(build_target(seed=1, vocab_size=VOCAB_SIZE - 1), TreeShape.chain(2)),
    "draft_tree": lambda: DraftModel(build_target(seed=1, vocab_size=VOCAB_SIZE + 1), _TREE),
    "medusa": _trained(MedusaObjective, _TREE, num_heads=2),
    "hydra": _trained(HydraObjective, _TREE, num_heads=2),
    "eagle": _trained(EagleObjective, _TREE),
    "eagle3": _trained(EagleObjective, _TREE, version=3, tap_layers=(0, 1, 2), draft_tokens=(0, 2, 3, 4, 6)),
    "amphista": _trained(AmphistaObjective, _TREE, num_heads=2),
    "parallelspec": _trained(ParallelSpecObjective, _TREE, num_masks=2),
    "falcon": _trained(FalconObjective, _TREE),
}


def make_drafter(kind):
    """A drafter of this kind, with the same weights each time."""
    from specdec.drafters.none import NoDrafter

    return DRAFTERS[kind]() or NoDrafter()

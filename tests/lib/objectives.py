"""What the tests of training share: texts as the frozen target reads them, and an objective of every kind."""

import torch

from lib.eagle_checks import DRAFT_TOKENS, SWITCHES, TAPS
from lib.families import random_prompts
from lib.parallelspec_equations import VARIANTS
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target
from specdec.training.data import Sample
from specdec.training.kinds import objective_class, training_settings
from specdec.training.objectives.base import TrainingBatch

_THIRD = {"tap_layers": TAPS, "draft_tokens": DRAFT_TOKENS, "num_unrolled": 3}
_BLOCK = {"tap_layers": (0, 1), "block_size": 4, "num_layers": 2, "mask_token_id": 3}
OBJECTIVES = {
    "draft_model": ("draft_model", {"teacher_weight": 0.5}),
    "medusa": ("medusa", {}),
    "medusa, shared LM head": ("medusa", {"vocab_size": None}),
    "hydra": ("hydra", {"num_heads": 3}),
    "hydra, shared LM head": ("hydra", {"num_heads": 3, "vocab_size": None, "teacher_weight": 1.0}),
    "hydra++": ("hydra++", {"num_heads": 3, "lm_weight": 1.0}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", _THIRD),
    "eagle3, each": ("eagle3", {**_THIRD, **SWITCHES["each"]}),
    "eagle3, own_embedding": ("eagle3", {**_THIRD, **SWITCHES["own_embedding"]}),
    "amphista": ("amphista", {}),
    "amphista, alpha": ("amphista", {"block_layers": 2}),
    "amphista, low rank": ("amphista", {"head_rank": 8}),
    "amphista, shared LM head": ("amphista", {"own_lm_heads": False}),
    "amphista, no staged adaptation": ("amphista", {"adaptation_layers": 0}),
    "amphista, no auto-embedding": ("amphista", {"auto_embedding": False}),
    **{f"parallelspec, {name}": ("parallelspec", {"num_masks": 3, **VARIANTS[name]}) for name in VARIANTS},
    "falcon": ("falcon", {}),
    "falcon, not recurrent": ("falcon", {"recurrent": False}),
    "mtp": ("mtp", {}),
    "mtp, laws": ("mtp", {"states_first": True, "teacher_weight": 0.5, "num_unrolled": 2}),
    "dflash": ("dflash", _BLOCK),
    "dspark": ("dspark", {**_BLOCK, "markov_rank": 8}),
    "dspark, rnn": ("dspark", {**_BLOCK, "markov_rank": 8, "markov_head_type": "rnn"}),
    "dspark, cross-entropy": (
        "dspark",
        {**_BLOCK, "markov_rank": 0, "has_confidence": False, "cross_entropy_weight": 1.0, "distance_weight": 0.0},
    ),
    "peagle": ("peagle", {"tap_layers": TAPS, "num_masks": 2, "num_layers": 2}),
    "peagle, own vocabulary": ("peagle", {"tap_layers": TAPS, "num_masks": 2, "draft_tokens": DRAFT_TOKENS}),
    "dflash, JetSpec": ("dflash", {**_BLOCK, "causal": True, "own_embedding": True, "shares_lm_head": False}),
}
"""Kind and settings by name."""


def new_objective(name, model, **changes):
    """An objective of `OBJECTIVES` around a new network; the same values every time."""
    kind, settings = OBJECTIVES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return objective_class(kind).new(Target(model), **{**training_settings(kind), **settings, **changes})


def random_texts(generator, lengths=(14, 9), first_learnt=3):
    """[B, T] texts, padded with 0 on the right, and [B, T] what is to be learnt: from `first_learnt` to their ends."""
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, prompt in enumerate(random_prompts(generator, list(lengths))):
        tokens[row, : len(prompt)] = prompt
        mask[row, first_learnt : len(prompt)] = True
    return tokens, mask


def samples(count=12, length=20, prompt=0, seed=0):
    """Random texts of `length` tokens, of which the first `prompt` are not to be learnt."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) >= prompt
    return [Sample(text, mask) for text in random_prompts(generator, [length] * count)]


@torch.no_grad()
def read_by(model, tokens, loss_mask=None, *, labels=None, tap_layers=(), progress=0.0):
    """A batch as the model sees it; by default everything is to be learnt, and labels are the tokens."""
    output = model(tokens, output_hidden_states=True)
    states = output.hidden_states
    return TrainingBatch(
        tokens,
        tokens if labels is None else labels,
        torch.ones_like(tokens, dtype=torch.bool) if loss_mask is None else loss_mask,
        hidden=states[-1],
        taps=tuple(states[layer + 1] for layer in tap_layers),
        progress=progress,
        **said(output.logits),
    )


def said(logits):
    """What a batch holds of the target's logits [B, T, V]."""
    return {"scores": Scores.of(logits), "best": torch.nn.functional.pad(logits.argmax(-1)[:, :-1], (1, 0))}

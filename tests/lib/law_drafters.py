"""A target of seven tokens, a drafter of every kind for it, and the rules that sample without loss.

Networks are random, and right often enough by chance. All tests that hold for every drafter go through `DRAFTERS`.
"""

from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lib import dflash2_cases, dflash_cases, dspark_cases
from lib.eagle_checks import random_peagle
from lib.mtp_files import randomized
from specdec.drafters.dflash import DFlash
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.dspark import DSpark
from specdec.drafters.mtp import Mtp
from specdec.drafters.peagle import PEagle
from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.union import Union
from specdec.drafters.weightless.lookahead import Lookahead
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafters.weightless.suffix import Suffix
from specdec.loop.rules import Naive, Rejection, Traversal
from specdec.models.networks.mtp import MtpConfig, MtpNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.amphista import AmphistaObjective
from specdec.training.objectives.eagle import EagleObjective
from specdec.training.objectives.falcon import FalconObjective
from specdec.training.objectives.hydra import HydraObjective, HydraPlusPlusObjective
from specdec.training.objectives.medusa import MedusaObjective
from specdec.training.objectives.parallelspec import ParallelSpecObjective
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

VOCAB_SIZE = 7
_TREE = TreeShape.from_k_config((3, 2))


@lru_cache
def build_target(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A random model whose laws are neither flat nor sure."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(**sizes, **heads, **no_tokens, initializer_range=0.25)
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


def _dflash(shape, **changes):
    return lambda: DFlash(dflash_cases.make_network(build_target(), block_size=3, **changes), shape)


def _peagle(shape, **changes):
    own = {"tap_layers": (0, 2), "draft_vocab_size": 5, "num_masks": 2, **changes}
    return lambda: PEagle(random_peagle(build_target(), **own), shape)


def _mtp(shape, **changes):
    return lambda: Mtp(randomized(MtpNetwork(MtpConfig.for_target(build_target().config, **changes))), shape)


def _dspark(shape, confidence=None, **changes):
    return lambda: DSpark(dspark_cases.random_network(build_target(), **changes), shape, confidence=confidence)


def _dflash2(shape, **changes):
    return lambda: DFlash(dflash2_cases.make_network(build_target(), block_size=3, **changes), shape)


def _union(*kinds, **settings):
    return lambda: Union([DRAFTERS[kind]() for kind in kinds], **settings)


DRAFTERS = {
    "none": NoDrafter,
    "prompt_lookup": lambda: PromptLookup(max_ngram=2, num_draft_tokens=3),
    "suffix": lambda: Suffix(num_draft_tokens=5, max_depth=3, max_match=3, corpus=[[1, 2, 3, 4, 5, 6]]),
    "lookahead": lambda: Lookahead(level=3, window=3, guesses=2),
    # vocabularies may be padded differently: one has a token more than the target, one lacks the target's last
    "draft_chain": lambda: DraftModel(build_target(seed=1, vocab_size=VOCAB_SIZE - 1), TreeShape.chain(2)),
    "draft_tree": lambda: DraftModel(build_target(seed=1, vocab_size=VOCAB_SIZE + 1), _TREE),
    "medusa": _trained(MedusaObjective, _TREE, num_heads=2),
    "hydra": _trained(HydraObjective, _TREE, num_heads=2),
    "hydra++": _trained(HydraPlusPlusObjective, _TREE, num_heads=2),
    "eagle": _trained(EagleObjective, _TREE),
    "eagle3": _trained(EagleObjective, _TREE, version=3, tap_layers=(0, 1, 2), draft_tokens=(0, 2, 3, 4, 6)),
    "eagle3, two layers": _trained(
        EagleObjective, _TREE, version=3, tap_layers=(0, 1, 2), num_layers=2, qk_norm=True, windows=(None, 5)
    ),
    "amphista": _trained(AmphistaObjective, _TREE, num_heads=2),
    "parallelspec": _trained(ParallelSpecObjective, _TREE, num_masks=2),
    "parallelspec_medusa": _trained(ParallelSpecObjective, _TREE, variant="medusa", num_masks=2),
    "falcon": _trained(FalconObjective, _TREE),
    "peagle": _peagle(_TREE),
    "peagle, chain": _peagle(TreeShape.chain(3), num_layers=2, own_embedding=True, draft_vocab_size=None),
    "peagle, grown": _peagle(DynamicTree(num_nodes=7, depth=2, top_k=3), qk_norm=True),
    "dflash": _dflash(_TREE),
    "dflash, chain": _dflash(TreeShape.chain(2), windows=(4, None), causal_windows=True),
    "dflash, causal": _dflash(_TREE, causal=True),
    "dflash, grown": _dflash(DynamicTree(num_nodes=6, depth=1, top_k=3)),
    "dflash2": _dflash2(_TREE),
    "dflash2, chain": _dflash2(TreeShape.chain(2), causal=True),
    "dflash2, grown": _dflash2(DynamicTree(num_nodes=6, depth=1, top_k=3)),
    "mtp": _mtp(_TREE),
    "mtp, two layers": _mtp(_TREE, num_layers=2),
    "dspark": _dspark(_TREE),
    "dspark, chain": _dspark(TreeShape.chain(3), markov_head_type="gated", draft_vocab_size=5, shares_lm_head=False),
    "dspark, path": _dspark(TreeShape.from_k_config((2, 2, 1)), markov_head_type="rnn", tap_layers=(-1, 2)),
    "dspark, grown": _dspark(DynamicTree(6, depth=2, top_k=3), confidence=0.5, markov_head_type="rnn"),
    "union": _union("suffix", "medusa"),
    "union, networks": _union("eagle", "draft_tree", num_nodes=6),
    # costs at which now one and now another way is worth most
    "union, sized": _union("prompt_lookup", "hydra++", costs=WayCosts({1: 1.0, 8: 1.5}, {1: 0.0, 2: 0.1, 3: 0.15})),
}


LEARNING = frozenset({"union", "union, networks", "union, sized"})
"""Kinds whose trees depend on what earlier calls accepted, or on how long steps took; texts never do."""

SAMPLING_RULES = {
    "naive": Naive(),
    "naive, drawn": Naive(drawn=True),
    "rejection": Rejection(),
    "rejection with replacement": Rejection(replacement=True),
    "traversal": Traversal(),
}


def make_drafter(kind):
    """A drafter of this kind, with the same weights each time."""
    return DRAFTERS[kind]()


def judged_by(rules):
    """Every (kind, name of a rule) of `rules` by name that can judge what the kind proposes."""
    drafters = {kind: make_drafter(kind) for kind in DRAFTERS}
    return [(kind, name) for kind, drafter in drafters.items() for name, rule in rules.items() if _fits(rule, drafter)]


def _fits(rule, drafter):
    try:
        rule.check(drafter)
    except ValueError:
        return False
    return True

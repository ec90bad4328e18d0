"""Random calls of `specdec.generate`, sound ones and flawed ones; every call is made from one integer alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from lib.fuzz_flaws import FAILING_CODE, FLAWS, Flaw, PlantedError
from lib.host_code import KeepingStreamer
from lib.law_drafters import DRAFTERS, LEARNING, VOCAB_SIZE, build_target, make_drafter
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS
from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.union import Union
from specdec.drafters.weightless.lookahead import Lookahead
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafters.weightless.suffix import Suffix
from specdec.drafting.base import Drafter
from specdec.drafting.network import NetworkDrafter
from specdec.loop.rules import RULES, Naive, Rejection, Traversal, Typical
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

KINDS = tuple(DRAFTERS)
WITHOUT_TREE = tuple(kind for kind in KINDS if kind in KINDS_WITHOUT_WEIGHTS)
DRAWING = tuple(name for name, rule in RULES.items() if rule.draws_drafts)


@dataclass
class Call:
    """One call.

    Attributes:
        seed: what it was made from.
        kind: of the drafter.
        prompts: per row of `input_ids`, its tokens without padding.
        arguments: those that have no state.
        makers: those that have one, made anew for every run.
        rule: the acceptance rule that must come of it.
        draws: whether it takes random numbers.
        global_seed: for `torch.manual_seed` before every run.
        training: whether the model is in training mode meanwhile.
        flaw: what is wrong with the arguments.
        interrupt_at: Ctrl-C comes at this use of PyTorch; 0 for never.
    """

    seed: int
    kind: str
    prompts: list[list[int]]
    arguments: dict[str, Any] = field(default_factory=dict)
    makers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    rule: str = "greedy"
    draws: bool = False
    global_seed: int = 0
    training: bool = False
    flaw: Flaw | None = None
    interrupt_at: int = 0

    def make(self, **changes: Any) -> dict[str, Any]:
        """All arguments but the model."""
        return {**self.arguments, **{name: make() for name, make in self.makers.items()}, **changes}

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, wherever it was given."""
        value = self.arguments.get(name, getattr(self.arguments.get("generation_config"), name, None))
        return default if value is None else value

    @property
    def width(self) -> int:
        """Length of the padded prompts."""
        return self.arguments["input_ids"].shape[1]

    @property
    def copies(self) -> int:
        """Texts per prompt."""
        return self.get("num_return_sequences", 1)

    @property
    def max_new_tokens(self) -> int:
        """Most new tokens of a text."""
        return self.get("max_new_tokens") or self.get("max_length") - self.width

    @property
    def stops(self) -> list[int]:
        """Tokens that end a text."""
        stops = self.get("eos_token_id", [])
        return [stops] if isinstance(stops, int) else stops

    def __str__(self) -> str:
        settings = self.make()
        config = settings.pop("generation_config", None)
        if isinstance(config, GenerationConfig):
            settings["generation_config"] = config.to_diff_dict()
        shape = getattr(settings.get("drafter"), "shape", None)
        if isinstance(shape, TreeShape):
            shape = shape.rank_paths[1:]
        title = f"call {self.seed}: {self.kind}, tree {shape}, training {self.training}, Ctrl-C at {self.interrupt_at}"
        return "\n".join([title, *(f"  {name} = {value!r}" for name, value in settings.items())])


class Grammar(LogitsProcessor):
    """A token is followed by one of the next three. No token follows a text that breaks this, or that has ended."""

    def __init__(self, stops: list[int]) -> None:
        self.stops = stops

    def __call__(self, ids, scores):
        kept = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(ids.tolist()):
            steps = {(after - token) % VOCAB_SIZE for token, after in pairwise(text)}
            if steps <= {1, 2, 3} and not set(text) & set(self.stops):
                allowed = [(text[-1] + step) % VOCAB_SIZE for step in (1, 2, 3)]
                kept[row, allowed] = scores[row, allowed]
        return kept


class NoTriple(LogitsProcessor):
    """No token three times in turn."""

    def __call__(self, ids, scores):
        scores = scores.clone()
        for row, text in enumerate(ids.tolist()):
            if text[-1:] == text[-2:-1]:
                scores[row, text[-1]] = -torch.inf
        return scores


class Parity(StoppingCriteria):
    """Ends a text whose last two tokens have a certain sum, from a certain length on."""

    def __init__(self, length: int, rest: int) -> None:
        self.length = length
        self.rest = rest

    def __call__(self, ids, scores, **kwargs):
        return (ids[:, -2:].sum(1) % 3 == self.rest) & torch.tensor(ids.shape[1] >= self.length)


def other_half(row, text):
    """A `prefix_allowed_tokens_fn`: even tokens after odd ones, and the reverse."""
    return list(range((int(text[-1]) + 1) % 2, VOCAB_SIZE, 2))


def make_call(seed: int) -> Call:
    """The call of this seed."""
    rng = random.Random(seed)
    do_sample = rng.random() < 0.6
    settings: dict[str, Any] = {"do_sample": True} if do_sample else rng.choice([{}, {"do_sample": False}])
    stops = rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1, 1, 2]))
    if stops:
        settings["eos_token_id"] = stops[0] if len(stops) == 1 and rng.random() < 0.5 else stops
    ban = rng.choice(["none", "none", "grammar", "prefix", "forced", "tokens", "ngram"])
    kind, prompts = rng.choice(KINDS), _prompts(rng, stops if ban == "grammar" else None)
    call = Call(seed, kind, prompts, global_seed=rng.randrange(2**31), training=rng.random() < 0.2)
    call.makers["logits_processor"] = _add_processors(rng, settings, stops, ban, do_sample)
    if ban == "prefix":
        call.arguments["prefix_allowed_tokens_fn"] = other_half
    _add_drafter_and_rule(rng, call, do_sample)
    _add_prompt(rng, call, settings, stops)
    _add_limits(rng, call, settings)
    copies = 1
    if do_sample and rng.random() < 0.15:
        copies = settings["num_return_sequences"] = rng.randint(1, 3)
    _add_seed(rng, call, len(prompts) * copies)
    if len(prompts) * copies == 1 and rng.random() < 0.4:
        call.makers["streamer"] = KeepingStreamer
    for name in ("output_scores", "output_logits"):
        if rng.random() < 0.3:
            settings[name] = True
    if rng.random() < 0.6:
        settings["return_dict_in_generate"] = True
    is_sound = rng.random() < 0.75
    if is_sound and rng.random() < 0.2:
        call.arguments["generation_config"] = GenerationConfig(**settings)
    else:
        call.arguments |= settings
    if not is_sound:
        _spoil(rng, call)
    return call


def _prompts(rng: random.Random, grammar_stops: list[int] | None) -> list[list[int]]:
    """One to four prompts of 1 to 20 tokens; under a grammar, texts that it allows and that have not ended."""
    prompts = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        length = rng.randint(1, 20)
        if grammar_stops is None:
            prompts.append([rng.randrange(VOCAB_SIZE) for _ in range(length)])
            continue
        text = [rng.choice([token for token in range(VOCAB_SIZE) if token not in grammar_stops])]
        while len(text) < length:
            after = [(text[-1] + step) % VOCAB_SIZE for step in (1, 2, 3)]
            text.append(rng.choice([token for token in after if token not in grammar_stops]))
        prompts.append(text)
    return prompts


def random_tree(rng: random.Random, max_depth: int, max_rank: int, *, dense: bool) -> TreeShape:
    """A chain, a k_config or any rank paths; `dense`: the children of a node take the ranks 0, 1, ..."""
    form = rng.random()
    if form < 0.2:
        return TreeShape.chain(rng.randint(1, max_depth))
    if form < 0.4:
        return TreeShape.from_k_config([rng.randint(1, 3) for _ in range(rng.randint(1, min(max_depth, 3)))])
    paths: set[tuple[int, ...]] = set()
    while not paths or rng.random() < 0.88:
        parent = rng.choice([(), *sorted(paths)])
        ranks = [rank for rank in range(max_rank + 1) if (*parent, rank) not in paths]
        if len(parent) < max_depth and ranks:
            paths.add((*parent, ranks[0] if dense else rng.choice(ranks)))
    return TreeShape.from_paths(paths)


def _add_drafter_and_rule(rng: random.Random, call: Call, do_sample: bool) -> None:
    """A drafter of the call's kind, and a rule that can judge it."""
    kind, rule = call.kind, rng.choice(["auto", "auto", *RULES])
    if not do_sample:
        rule = rng.choice(["auto", "auto", *(name for name, one in RULES.items() if not one().samples)])
    elif rule == "greedy" or (rule in DRAWING and kind in WITHOUT_TREE):
        rule = "auto"
    if kind in LEARNING and rule == "typical":  # whose text is another one with other trees
        rule = "auto"
    made = make_drafter(kind)
    must_grow = isinstance(made.shape, DynamicTree)
    if must_grow and rule in DRAWING:
        rule = "auto"
    dense = rule in DRAWING
    max_depth, num_tokens = _limits(made)
    shape: TreeShape | DynamicTree = random_tree(rng, max_depth, num_tokens - 1, dense=dense)
    if rule == "traversal" and made.shares_candidates:
        shape = TreeShape.chain(rng.randint(1, 2))
    if getattr(made, "grows_trees", False) and not dense and (rng.random() < 0.4 or must_grow):
        depth, top_k = rng.randint(0, max_depth - 1), rng.randint(1, 4)
        shape = DynamicTree(rng.randint(2, min(20, 1 + top_k + depth * top_k**2)), depth=depth, top_k=top_k)
    if kind in LEARNING:
        shape = made.shape
    call.makers["drafter"] = _drafter_maker(rng, call, shape)
    # which of the lossless rules "auto" means under sampling makes no difference here
    call.rule = rule if rule != "auto" else "naive" if do_sample else "greedy"
    drawn = kind not in WITHOUT_TREE and isinstance(shape, TreeShape) and rng.random() < 0.5
    objects = {"naive": Naive(drawn), "rejection": Rejection(rng.random() < 0.5), "traversal": Traversal()}
    root = rng.choice(["greedy", "sampled"]) if do_sample else "greedy"
    objects["typical"] = Typical(rng.uniform(0.01, 1), rng.uniform(0.01, 1), root)
    call.draws = call.rule not in ("greedy", "typical")
    if rule != "auto" or rng.random() < 0.5:
        chosen = objects[rule] if rule in objects and rng.random() < 0.5 else rule
        call.arguments["acceptance"] = chosen
        call.draws |= isinstance(chosen, Typical) and chosen.samples


def _limits(drafter: Drafter) -> tuple[int, int]:
    """The deepest tree that a drafter is asked for, and how many tokens it can propose."""
    if not isinstance(drafter, NetworkDrafter):
        return 4, VOCAB_SIZE
    config = drafter.network.config
    limit = drafter.depth_limit(config)
    selector = getattr(drafter.network, "candidate_selector", None)
    num_tokens = getattr(config, "num_draft_tokens", VOCAB_SIZE) if selector is None else selector.top_k
    return 4 if limit is None else min(4, limit[0]), num_tokens


def _drafter_maker(rng: random.Random, call: Call, shape: TreeShape | DynamicTree) -> Callable[[], Any]:
    """What makes the drafter of every run: the same object, or a new one."""
    kind = call.kind
    if kind == "none":
        return rng.choice([lambda: None, lambda: "none", lambda: make_drafter("none")])
    if kind == "prompt_lookup":
        ngram, count = rng.randint(1, 3), rng.randint(1, 6)
        if rng.random() < 0.3:
            call.arguments["tree"] = count
            return lambda: kind
        return lambda: PromptLookup(max_ngram=ngram, num_draft_tokens=count)
    if kind == "suffix":
        tokens, depth, match = rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 4)
        made = Suffix(num_draft_tokens=tokens, max_depth=depth, max_match=match, shared=rng.random() < 0.2)
        return lambda: made
    if kind == "lookahead":
        level, window, guesses = rng.randint(2, 4), rng.randint(1, 4), rng.randint(1, 4)
        return lambda: Lookahead(level=level, window=window, guesses=guesses)
    if kind.startswith("draft"):
        model = build_target(seed=rng.choice([0, 1]))  # now and then the target itself, which is always right
        if rng.random() < 0.3:
            call.arguments["tree"] = rng.choice([shape, 3, (2, 2)])
            return lambda: model
        return lambda: DraftModel(model, shape)
    if kind in LEARNING:
        return _union_maker(rng)
    made = make_drafter(kind)
    if kind in WITHOUT_TREE:
        return lambda: made
    if rng.random() < 0.3:
        same = made.with_tree(shape)
        return lambda: same
    return lambda: made.with_tree(shape)


def _union_maker(rng: random.Random) -> Callable[[], Any]:
    """What makes a union of some drafters, of a random budget, that is sized by random costs or not at all."""
    names = rng.sample([name for name in KINDS if name not in (*LEARNING, "none", "lookahead")], rng.choice([2, 2, 3]))
    budget = rng.randint(len(names) + 1, 24)
    pass_ms = {1: 1.0, 4: 1 + rng.random(), 16: 2 + 8 * rng.random()}
    draft_ms = {1 << number: 2 * rng.random() for number in range(len(names))}
    costs = WayCosts(pass_ms, draft_ms) if rng.random() < 0.7 else None
    made = Union([make_drafter(name) for name in names], names=names, num_nodes=budget, costs=costs)
    return rng.choice([lambda: made, lambda: made.with_costs(costs)])


def _add_prompt(rng: random.Random, call: Call, settings: dict[str, Any], stops: list[int]) -> None:
    """`input_ids` and `attention_mask`, padded on the left or the right with any token."""
    prompts, width = call.prompts, max(map(len, call.prompts))
    filler = rng.randrange(VOCAB_SIZE)
    on_left = rng.random() < 0.5
    rows, mask = [], []
    for prompt in prompts:
        gap = width - len(prompt)
        rows.append([filler] * gap + prompt if on_left else prompt + [filler] * gap)
        mask.append([0] * gap + [1] * len(prompt) if on_left else [1] * len(prompt) + [0] * gap)
    call.arguments["input_ids"] = torch.tensor(rows, dtype=rng.choice([torch.int64, torch.int64, torch.int32]))
    if rng.random() < 0.4:
        settings["pad_token_id"] = rng.randrange(VOCAB_SIZE)
    is_ragged = any(len(prompt) < width for prompt in prompts)
    pads = settings.get("pad_token_id") is not None and settings["pad_token_id"] not in stops
    if is_ragged or pads or rng.random() < 0.5:
        call.arguments["attention_mask"] = torch.tensor(mask, dtype=rng.choice([torch.int64, torch.bool]))


def _add_processors(
    rng: random.Random, settings: dict[str, Any], stops: list[int], ban: str, do_sample: bool
) -> Callable[[], list[Any]]:
    """Settings that change the target's law, each now and then; what could leave no token at all is not combined."""
    free = [token for token in range(VOCAB_SIZE) if token not in stops]
    choices: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.uniform(0.5, 2.0),
        "sequence_bias": lambda: {(rng.choice(free),): rng.uniform(-4, 4), (1, rng.choice(free)): rng.uniform(-4, 4)},
        "renormalize_logits": lambda: True,
        "min_length": lambda: rng.randint(0, 25),
        "min_new_tokens": lambda: rng.randint(0, 12),
    }
    custom: list[Callable[[], Any]] = []
    if ban == "grammar":
        custom.append(lambda: Grammar(stops))
    elif ban == "forced":
        settings["forced_eos_token_id"] = rng.randrange(VOCAB_SIZE)
        settings["forced_bos_token_id"] = rng.choice([None, 3])
    elif ban == "tokens":
        settings["bad_words_ids"] = [[rng.choice(free)], [2, rng.choice(free)]]
        settings[rng.choice(["suppress_tokens", "begin_suppress_tokens"])] = [rng.choice(free)]
    elif ban == "ngram":
        settings["no_repeat_ngram_size"] = rng.choice([3, 4])
    if ban == "none":
        custom += [NoTriple] * (rng.random() < 0.3)
    if stops:
        choices["exponential_decay_length_penalty"] = lambda: (rng.randint(0, 5), rng.uniform(1.0, 1.5))
    else:  # with that penalty it gives inf, in transformers too
        choices["remove_invalid_values"] = lambda: True
    if do_sample:
        choices |= {
            "temperature": lambda: rng.choice([0.3, 0.7, 1.0, 1.6]),
            "top_k": lambda: rng.choice([0, 1, 2, 4, 50]),
            "top_p": lambda: rng.choice([0.3, 0.8, 1.0]),
            "min_p": lambda: rng.choice([0.0, 0.1, 0.4]),
            "typical_p": lambda: rng.choice([0.4, 0.9, 1.0]),
            "epsilon_cutoff": lambda: rng.choice([0.01, 0.1]),
            "eta_cutoff": lambda: rng.choice([0.01, 0.1]),
        }
    share = rng.choice([0.0, 0.1, 0.3])
    settings |= {name: choose() for name, choose in choices.items() if rng.random() < share}
    return lambda: [make() for make in custom]


def _add_limits(rng: random.Random, call: Call, settings: dict[str, Any]) -> None:
    """How long the texts may become."""
    width = max(map(len, call.prompts))
    most = rng.randint(1, 20)
    if rng.random() < 0.1:
        settings["max_length"] = width + most
    else:
        settings["max_new_tokens"] = most
    if most % 4 == 0:
        settings["prefill_chunk_size"] = 1 + width % 5
    if rng.random() < 0.1:
        settings["max_time"] = rng.choice([1000.0, 1000.0, 1e-9])
    if rng.random() < 0.25:
        length, rest = rng.randint(1, 30), rng.randrange(3)
        call.makers["stopping_criteria"] = lambda: [Parity(length, rest)]


def _add_seed(rng: random.Random, call: Call, batch_size: int) -> None:
    """A seed in one of its forms."""
    form, value = rng.choice(["int", "list", "tuple", "generator", "global", "large"]), rng.randrange(2**40)
    if form == "int":
        call.arguments["seed"] = value
    elif form in ("list", "tuple"):
        seeds = [rng.randrange(2**63) for _ in range(batch_size)]
        call.arguments["seed"] = seeds if form == "list" else tuple(seeds)
    elif form == "generator":
        call.makers["seed"] = lambda: torch.Generator().manual_seed(value)
    elif form == "large":
        call.arguments["seed"] = 2**63 + value


def _spoil(rng: random.Random, call: Call) -> None:
    """Make it a call that must fail, or one that may be made to."""
    form = rng.random()
    if form < 0.15:
        call.interrupt_at = int(10 ** rng.uniform(0, 4))
    elif form < 0.4:
        _plant(rng, call)
    else:
        call.flaw = rng.choice(FLAWS)
        for name in ("seed", *call.flaw.arguments):
            call.makers.pop(name, None)
        call.arguments |= {"num_return_sequences": None, "seed": 0, **call.flaw.arguments}


def _plant(rng: random.Random, call: Call) -> None:
    """Put code into the call that raises sooner or later."""
    name = rng.choice(sorted(FAILING_CODE))
    uses, error = rng.randint(1, 12), rng.choice([PlantedError, KeyboardInterrupt])
    call.arguments.pop(name, None)
    call.makers[name] = lambda: FAILING_CODE[name](uses, error)
    if name == "streamer" and call.copies * len(call.prompts) > 1:
        call.makers.pop("seed", None)
        del call.prompts[1:]
        row = torch.tensor(call.prompts)
        call.arguments |= {"input_ids": row, "attention_mask": torch.ones_like(row), "seed": 0}
        call.arguments["num_return_sequences"] = None

"""What can be wrong with a call: bad arguments, each with its error, and code of the caller that raises one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, StoppingCriteria

from lib.law_drafters import VOCAB_SIZE, make_drafter


@dataclass(frozen=True)
class Flaw:
    """Arguments that must be refused, with the argument that the message must begin with."""

    name: str
    arguments: dict[str, Any]
    types: tuple[type[BaseException], ...] = (TypeError, ValueError)


def _flaws(name: str, values: list[Any], **others: Any) -> list[Flaw]:
    return [Flaw(name, {**others, name: value}) for value in values]


_SAMPLING = {"do_sample": True, "acceptance": "auto"}
_ONE = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)}
_THREE = {"input_ids": torch.ones(3, 4, dtype=torch.int64), "attention_mask": torch.ones(3, 4)}
_NAN, _INF = float("nan"), float("inf")

FLAWS = [
    *_flaws("max_new_tokens", [0, -1, 64, "ten", True, 2.5]),
    *_flaws("max_length", [1, 0, "long"], max_new_tokens=None),
    *_flaws("max_time", [0.0, -1, "soon", _NAN]),
    *_flaws("prefill_chunk_size", [0, -8, "half", 2.5]),
    *_flaws("temperature", [0.0, -1.0, "hot", True, _NAN, _INF], **_SAMPLING),
    *_flaws("top_p", [0.0, 1.5, -0.1, "most", _NAN], **_SAMPLING),
    *_flaws("top_k", [-3, 2.5, "all"], **_SAMPLING),
    *_flaws("min_p", [-0.1, 1.1, "few", _NAN], **_SAMPLING),
    *_flaws("typical_p", [0.0, 2.0, "some"], **_SAMPLING),
    *_flaws("epsilon_cutoff", [2.0, -0.1, "low"], **_SAMPLING),
    *_flaws("eta_cutoff", [2.0, -0.1, "low"], **_SAMPLING),
    *_flaws("repetition_penalty", [0.0, -2.0, "much", _NAN]),
    *_flaws("no_repeat_ngram_size", [-1, 1.5, "two"]),
    *_flaws("min_new_tokens", [-2, "some", 1.5]),
    *_flaws("min_length", [-1, "some"]),
    *_flaws("bad_words_ids", [[], [[]], [[-1]], [[VOCAB_SIZE]], [1], "words", 3]),
    *_flaws("sequence_bias", [{}, "bias", {(1,): "much"}, {(): 1.0}, {(VOCAB_SIZE,): 1.0}, [3], 3]),
    *_flaws("suppress_tokens", ["a", 3.5, [VOCAB_SIZE]]),
    *_flaws("begin_suppress_tokens", ["a", 3.5, [-1]]),
    *_flaws("forced_bos_token_id", ["a", VOCAB_SIZE, [1]]),
    *_flaws("forced_eos_token_id", ["a", VOCAB_SIZE]),
    *_flaws("exponential_decay_length_penalty", [(1,), "x", 3], eos_token_id=2),
    *_flaws("eos_token_id", ["a", [1.5], 1.5]),
    *_flaws("pad_token_id", ["a", 1.5]),
    *_flaws("num_return_sequences", [0, -1, "two"]),
    *_flaws("num_return_sequences", [2], do_sample=False, acceptance="auto"),
    *_flaws("seed", [-1, "a", 1.5, True, [-1], ["a"], [1.5], [1] * 50, []]),
    *_flaws("acceptance", ["lucky", 3, None, "greedy"], do_sample=True),
    *_flaws("acceptance", ["naive", "rejection", "traversal"], do_sample=False),
    *_flaws("acceptance", ["rejection", "traversal"], do_sample=True, drafter="prompt_lookup", tree=None),
    *_flaws("tree", [3, (2, 2), "bogus", "medusa/mc_sim", 2.5], drafter=make_drafter("medusa")),
    *_flaws("tree", [3, "bogus", 2.5, (2, "a")], drafter="none"),
    *_flaws("tree", [(2, 2), "bogus", 2.5], drafter="prompt_lookup"),
    *_flaws("drafter", [3, "medusa", [1]], tree=None),
    Flaw("drafter", {"drafter": "nothing", "tree": None}, (FileNotFoundError,)),
    *_flaws("input_ids", [None, [[1, 2]], torch.tensor([1, 2]), torch.rand(1, 3), torch.ones(1, 0, dtype=torch.int64)]),
    *_flaws("input_ids", [torch.tensor([[1, VOCAB_SIZE]]), torch.tensor([[-1, 2]])], attention_mask=None),
    *_flaws("attention_mask", [torch.ones(1, 50), "all", [1, 1], torch.ones(3)]),
    *_flaws("attention_mask", [torch.tensor([[1, 0, 1]]), torch.zeros(1, 3)], input_ids=torch.tensor([[1, 2, 3]])),
    *_flaws("max_new_token", [3]),
    *_flaws("save_pretrained", [3]),
    Flaw("num_beams", {"num_beams": 4}, (NotImplementedError,)),
    Flaw("dola_layers", {"dola_layers": "low"}, (NotImplementedError,)),
    Flaw("guidance_scale", {"guidance_scale": 2.0}, (NotImplementedError,)),
    Flaw("tokenizer", {"stop_strings": ["a"]}),
    *_flaws("stop_strings", [3, [3]]),
    *_flaws("streamer", [object(), 3], **_ONE),
    *_flaws("streamer", [type("Streamer", (), {"put": print, "end": print})()], **_THREE),
    *_flaws("prefix_allowed_tokens_fn", [3, lambda row, text: [], lambda row, text: [VOCAB_SIZE]]),
    *_flaws("generation_config", ["greedy", {"max_new_tokens": 3}, 3]),
    *_flaws("logits_processor", [3, [3], LogitsProcessor, lambda ids, scores: scores]),
    *_flaws("logits_processor", [[lambda ids, scores: scores * _NAN], [lambda ids, scores: scores - _INF]]),
    *_flaws("logits_processor", [[lambda ids, scores: scores[:, :3]], [lambda ids, scores: None]]),
    *_flaws("stopping_criteria", [3, [3], StoppingCriteria, [lambda ids, scores: None]]),
]


class PlantedError(Exception):
    """The caller's own."""


class Countdown:
    """Raises when it is used for the nth time."""

    def __init__(self, uses: int, error: type[BaseException]) -> None:
        self.uses = uses
        self.error = error
        self.has_raised = False

    def count(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            self.has_raised = True
            raise self.error


class FailingProcessor(Countdown, LogitsProcessor):
    def __call__(self, ids, scores):
        self.count()
        return scores


class FailingCriterion(Countdown, StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        self.count()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


class FailingStreamer(Countdown):
    def put(self, value):
        self.count()

    def end(self):
        self.count()


class FailingAllowed(Countdown):
    def __call__(self, row, text):
        self.count()
        return list(range(VOCAB_SIZE))


class Interrupt(Countdown, TorchFunctionMode):
    """Ctrl-C at the nth thing that PyTorch is asked for, wherever that is."""

    def __init__(self, uses: int) -> None:
        TorchFunctionMode.__init__(self)
        Countdown.__init__(self, uses, KeyboardInterrupt)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch._C._set_grad_enabled:  # else `torch.no_grad` would not restore the mode on its exit
            self.count()
        return function(*args, **(kwargs or {}))


# of code that fails: the argument that takes it, and what makes it
FAILING_CODE = {
    "logits_processor": lambda uses, error: [FailingProcessor(uses, error)],
    "stopping_criteria": lambda uses, error: [FailingCriterion(uses, error)],
    "streamer": FailingStreamer,
    "prefix_allowed_tokens_fn": FailingAllowed,
}

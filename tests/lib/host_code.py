"""Code of a caller that the tests of `generate` hand over, transformers' warpers, and a model that is often right."""

import copy

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as hf


@torch.no_grad()
def noisy_copy(model):
    """The target with disturbed weights: a draft model that is right now and then."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other


class Alternating(LogitsProcessor):
    """Like a grammar: even and odd tokens take turns, as the text's length says."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill((torch.arange(scores.shape[1]) + input_ids.shape[1]) % 2 == 0, -torch.inf)


class EndsAt(StoppingCriteria):
    """Ends a text at a length; asks to see every prefix on the way."""

    def __init__(self, length):
        self.length = length
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class KeepingStreamer:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.ended = False

    def put(self, value):
        assert not self.ended, "a streamer was fed after its end"
        self.received.append(value.flatten().tolist())

    def end(self):
        self.ended = True

    def check(self, text: list[int]) -> None:
        """It must have been given the whole text, in order, and never nothing."""
        assert self.ended
        assert all(self.received), self.received
        assert [token for tokens in self.received for token in tokens] == text, f"{self.received}, not {text}"


def by_transformers(settings, ids, scores):
    """transformers' own warpers, in its order."""
    settings = {"top_k": 50, **settings}
    made = [
        hf.RepetitionPenaltyLogitsProcessor(settings.get("repetition_penalty", 1.0)),
        *([hf.NoRepeatNGramLogitsProcessor(1)] if "no_repeat_ngram_size" in settings else []),
        hf.TemperatureLogitsWarper(settings.get("temperature", 1.0)),
        *([hf.TopKLogitsWarper(settings["top_k"])] if settings["top_k"] else []),
        hf.TopPLogitsWarper(settings.get("top_p", 1.0)),
        hf.MinPLogitsWarper(settings.get("min_p", 0.0)),
        *([hf.TypicalLogitsWarper(settings["typical_p"])] if "typical_p" in settings else []),
        *([hf.EpsilonLogitsWarper(settings["epsilon_cutoff"])] if "epsilon_cutoff" in settings else []),
        *([hf.EtaLogitsWarper(settings["eta_cutoff"])] if "eta_cutoff" in settings else []),
        *([hf.LogitNormalization()] if "renormalize_logits" in settings else []),
    ]
    for processor in made:
        scores = processor(ids, scores)
    return scores

"""Acceptance under greedy decoding without the target: its text is known, so that drafters are judged by that text.

Greedy decoding is lossless: whatever drafts, the text is that of plain decoding. So one plain decoding of every prompt
(`record`) says all that a drafter's steps will ask of the target. The nodes that are kept lie on the text; of them the
target's states and best tokens were recorded. Nodes beside it are never kept, and nobody reads what stands at them.
`replay` runs the real decoder, rule and drafter on a `RecordedTarget`, which looks up instead of computing: a drafter's
tau costs the drafter's own passes, and no LM head of the target runs.

The figures are those of real decoding as far as states are: recorded by passes of other shapes they differ in the last
bits, which may turn a near-tie of a drafter.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specdec.common.checks import check_at_least
from specdec.common.files import replace_file
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Drafter, Prompt
from specdec.kernels.common.verdict import Verdict
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats
from specdec.models.common.cache import KVCache
from specdec.models.target.scores import PrefillOutput, Scores, TargetOutput
from specdec.models.target.target import PREFILL_CHUNK_SIZE, Target

__all__ = ["RecordedTarget", "RecordedText", "Recording", "record", "replay"]


@dataclass(frozen=True, slots=True)
class RecordedText:
    """What plain decoding of one prompt gave.

    Attributes:
        prompt: [P] int64.
        new: [n] int64 emitted tokens, at least one.
        hidden: [P + n - 1, C] states of all tokens but the last, which the target never read.
        taps: per layer of the recording, [P + n - 1, C].
    """

    prompt: torch.Tensor
    new: torch.Tensor
    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """The texts of some prompts, in their order, and where they end.

    Attributes:
        texts: one per prompt.
        max_new_tokens: most tokens of each.
        stop_tokens: tokens after which a text ends.
        tap_layers: decoder layers whose outputs were recorded.
    """

    texts: tuple[RecordedText, ...]
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    tap_layers: tuple[int, ...]

    def save(self, path: str | Path) -> None:
        """Keep it in a file, which is replaced in one step."""
        texts = [(text.prompt, text.new, text.hidden, list(text.taps)) for text in self.texts]
        content = io.BytesIO()
        torch.save([texts, self.max_new_tokens, list(self.stop_tokens), list(self.tap_layers)], content)
        replace_file(path, content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> "Recording":
        """Read what `save` wrote."""
        texts, max_new_tokens, stop_tokens, tap_layers = torch.load(path, weights_only=True)
        read = (RecordedText(prompt, new, hidden, tuple(taps)) for prompt, new, hidden, taps in texts)
        return cls(tuple(read), max_new_tokens, tuple(stop_tokens), tuple(tap_layers))


def record(
    target: Target,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    *,
    stop_tokens: Sequence[int] = (),
    batch_size: int = 16,
    on_progress: Callable[[int], None] | None = None,
) -> Recording:
    """Decode prompts plainly and keep what the target said about every token.

    Args:
        target: the target; what is tapped of it now is recorded (`Target.tap`), as some drafters read it.
        prompts: 1-D int64 tensors.
        max_new_tokens: most new tokens per prompt.
        stop_tokens: tokens after which a text ends.
        batch_size: prompts that are decoded at a time.
        on_progress: called with the number of prompts that are done.

    Raises:
        ValueError: no prompt, or one that does not fit.
    """
    check_at_least(1, {"prompts": len(prompts), "batch_size": batch_size})
    texts: list[RecordedText] = []
    for first in range(0, len(prompts), batch_size):
        rows = list(prompts[first : first + batch_size])
        recorder = _Recorder()
        # a recorder is code on the host, which has to see every step
        new = Decoder(target, recorder, capture=False).decode(rows, max_new_tokens, stop_tokens=stop_tokens).tokens
        texts += [
            recorder.text(row, prompt, tokens) for row, (prompt, tokens) in enumerate(zip(rows, new, strict=True))
        ]
        if on_progress is not None:
            on_progress(len(texts))
    return Recording(tuple(texts), max_new_tokens, tuple(stop_tokens), target.tap_layers)


def replay(
    target: "RecordedTarget", drafter: Drafter | None, *, batch_size: int = 1, max_new_tokens: int | None = None
) -> AcceptanceStats:
    """What a drafter's steps accept on the recorded prompts under greedy decoding.

    Args:
        target: what was recorded.
        drafter: what proposes, loaded for the target; None for plain decoding.
        batch_size: prompts that are decoded at a time.
        max_new_tokens: less than what was recorded, to see the beginnings of the texts alone.

    Returns:
        Statistics with a row per prompt, in the order of the recording. Its times are the drafter's alone.

    Raises:
        NotImplementedError: a drafter that learns from nodes which were not accepted.
        RuntimeError: the text that came is not the recorded one: the drafter was loaded for another target.
        ValueError: more tokens than were recorded.
    """
    check_at_least(1, {"batch_size": batch_size, "max_new_tokens": max_new_tokens})
    recording, stats = target.recording, []
    length = recording.max_new_tokens if max_new_tokens is None else max_new_tokens
    if length > recording.max_new_tokens:
        raise ValueError(f"max_new_tokens: expected at most the recorded {recording.max_new_tokens}, got {length}")
    if drafter is not None and drafter.reads_rejected:
        raise NotImplementedError(
            f"drafter: expected one that reads accepted nodes alone, got {drafter.kind}, for which a recording has not "
            "enough; measure it by decoding"
        )
    decoder = Decoder(target, drafter, capture=False)
    for first in range(0, len(recording.texts), batch_size):
        texts = recording.texts[first : first + batch_size]
        prompts = [text.prompt for text in texts]
        result = decoder.decode(prompts, length, stop_tokens=recording.stop_tokens)
        if result.tokens != [text.new[:length].tolist() for text in texts]:
            raise RuntimeError(f"drafter: expected the recorded texts {first} and on, got others from {drafter!r}")
        stats.append(result.stats)
    return AcceptanceStats.merged(stats)


class RecordedTarget(Target):
    """A target that looks up what it said when it decoded plainly; for greedy decoding of the recorded prompts alone.

    Args:
        target: what was recorded; its model is not run, but drafters share its embedding and its LM head.
        recording: of that target.
    """

    cached_layers = 0  # a cache tells only how much of each row was committed

    def __init__(self, target: Target, recording: Recording) -> None:
        super().__init__(target.model, tap_layers=recording.tap_layers, backend=target.backend, fused=False)
        self.recording = recording
        self._texts = {tuple(text.prompt.tolist()): text for text in recording.texts}

    def tap(self, layers: Sequence[int]) -> list[int]:
        """As `Target.tap`, of the layers that were recorded.

        Raises:
            ValueError: a layer that was not.
        """
        recording: Recording | None = getattr(self, "recording", None)  # none yet while the base class is set up
        if recording is not None and (missing := sorted(set(layers) - set(recording.tap_layers))):
            raise ValueError(
                f"tap_layers: expected some of the recorded {list(recording.tap_layers)}, got {missing}; bind the "
                "drafter to the target before the recording is made"
            )
        return super().tap(layers)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Nothing to hook."""
        with self.locked():
            yield

    def prefill_chunks(
        self, tokens: torch.Tensor, lengths: torch.Tensor, cache: KVCache, *, chunk_size: int = PREFILL_CHUNK_SIZE
    ) -> Iterator[PrefillOutput]:
        """As `Target.prefill_chunks`, for recorded prompts.

        Raises:
            ValueError: a prompt that was not recorded.
        """
        self._lay_out([row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)])
        for first in range(0, tokens.shape[1], chunk_size):
            end = min(first + chunk_size, tokens.shape[1])
            if end == tokens.shape[1]:
                cache.lengths.copy_(lengths)
            hidden, *taps = (states[:, first:end] for states in self._states)
            yield PrefillOutput(self._scores(lengths[:, None].long() - 1), hidden, tuple(taps), first=first)

    def score(
        self,
        tokens: torch.Tensor,
        depth: torch.Tensor,
        ancestors: torch.Tensor,
        cache: KVCache,
        *,
        first_node: int = 0,
    ) -> TargetOutput:
        """Look up what was said at each node's position: true of every node on the text, which begins at the root.

        A node beside the text gets what stands at its position, too. Acceptance never looks there: it walks down from
        the root as long as a child carries the target's token, so that it sees the text and the nodes on it.
        """
        positions = cache.lengths[:, None].long() + depth
        roots = self._tokens.gather(1, cache.lengths[:, None].long())[:, 0]
        if first_node == 0 and not torch.equal(roots, tokens[:, 0].long()):
            raise RuntimeError(f"tokens: expected the recorded roots {roots.tolist()}, got {tokens[:, 0].tolist()}")
        places = torch.minimum(positions, self._last[:, None])
        rows = torch.arange(places.shape[0], device=places.device)[:, None]
        hidden, *taps = (states[rows, places] for states in self._states)
        return TargetOutput(self._scores(places), hidden, tuple(taps))

    def _lay_out(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put the texts that begin with these prompts side by side, right-padded with zeros."""
        missing = [place for place, prompt in enumerate(prompts) if tuple(prompt) not in self._texts]
        if missing:
            raise ValueError(f"prompts: expected recorded ones alone, got others at {missing[:5]}")
        texts = [self._texts[tuple(prompt)] for prompt in prompts]

        def side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)

        self._tokens = side_by_side([torch.cat((text.prompt, text.new)) for text in texts])  # [B, T]
        states = zip(*((text.hidden, *text.taps) for text in texts), strict=True)
        self._states = [side_by_side(list(rows)) for rows in states]  # [B, T - 1, C] each
        self._last = torch.tensor([text.hidden.shape[0] - 1 for text in texts], device=self.device)

    def _scores(self, places: torch.Tensor) -> Scores:
        """Of [B, M] places of the texts: the token behind each is the best one."""
        return _RecordedScores(self._tokens.gather(1, places + 1).int())

    def _forward(self, *_: Any, **__: Any) -> Scores:
        raise NotImplementedError("target: expected passes that were recorded, got another; use the recorded Target")


class _RecordedScores(Scores):
    """The best token of every place, and nothing else.

    Args:
        best: [B, M] int32.
    """

    def __init__(self, best: torch.Tensor) -> None:
        # what the base class computes when it is asked is here already
        vars(self).update(best=best, has_nan=torch.zeros_like(best, dtype=torch.bool))

    @cached_property
    def logits(self) -> torch.Tensor:
        """There are none."""
        raise NotImplementedError("acceptance: expected greedy without processing for a recorded target")


class _Recorder(NoDrafter):
    """Plain decoding that keeps the target's states."""

    def __init__(self) -> None:
        self._read: list[tuple[torch.Tensor, ...]] = []  # hidden and taps of the prompt, [B, T, C]
        self._steps: list[tuple[torch.Tensor, ...]] = []  # of each step's root, [B, 1, C]

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Keep a chunk of the prompts."""
        self._read.append(_copies(output))

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep what was said about the root."""
        self._steps.append(_copies(output))

    def text(self, row: int, prompt: torch.Tensor, new: Sequence[int]) -> RecordedText:
        """What is known of a row that got these new tokens."""
        num_steps = len(new) - 1  # the first token is the prompt's
        read = [
            torch.cat([chunk[row] for chunk in chunks])[: prompt.shape[0]] for chunks in zip(*self._read, strict=True)
        ]
        told = zip(*self._steps[:num_steps], strict=True) if num_steps else ((),) * len(read)
        states = [torch.cat([part, *(step[row] for step in steps)]) for part, steps in zip(read, told, strict=True)]
        tokens = torch.tensor(new, dtype=torch.int64)
        return RecordedText(prompt.cpu().long(), tokens, states[0], tuple(states[1:]))


def _copies(output: PrefillOutput | TargetOutput) -> tuple[torch.Tensor, ...]:
    """The states of a pass in memory of their own, which no later pass overwrites."""
    return tuple(states.clone() for states in (output.hidden, *output.taps))

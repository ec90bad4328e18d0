"""What the decoding loop changes from step to step: tensors at fixed addresses, updated in place.

A CUDA graph is replayed on addresses. So a step must find everything it reads where it was when the step was captured,
and leave everything there: no attribute of the state is ever bound to another tensor, and nothing that grows from step
to step is kept on the host. The eager loop uses the same state and the same step.

A step may run when all rows have finished. It then changes nothing that is reported and writes nowhere else than a
step before it might have: a finished row has budget 0, emits nothing, and keeps its length, and with it its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.common.randomness import Uniforms
from specdec.drafting.base import Prompt, Room, to_device
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.emit_step import emit_step
from specdec.kernels.sample_probs import WarpSettings
from specdec.models.common.cache import KVCache, RowState
from specdec.models.target.target import Target

__all__ = ["DecodeState"]


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Everything that changes from step to step, on the device.

    Attributes:
        room: the sizes that the tensors were made for.
        path_length: most tokens that a step emits per row.
        cache: the target's keys and values, with the committed length of each row.
        uniforms: the random numbers of this call.
        settings: [B, 5] float32, what `warp_logits` takes; read by steps that process logits.
        text: [B, max_prompt + max_new_tokens] int32, `prompt` and `output` in one memory, -1 where there is no
            token.
        prompt: [B, max_prompt] int32, -1 where a row has no token.
        root: [B] int32, last emitted token, not yet in the cache.
        budget: [B] int32, tokens that each row may still emit; 0 for a finished row.
        output: [B, max_new_tokens] int32, emitted tokens, -1 padded.
        num_output: [B] int32, emitted tokens per row.
        progress: [2] int32: 1 while any row is running, else 0; and the first step whose logits held NaN, -1 if there
            is none. What the host asks for.
        steps: [max_new_tokens + 1, 2, B] int32, of each step in which any row was running, the prompt first: tokens
            that each row emitted, and the depth of the deepest node that was proposed. Steps are counted by
            `uniforms.step`.
        nan_rows: [B] int32, 1 for rows that had a NaN among their logits while they ran.
    """

    room: Room
    path_length: int
    cache: KVCache
    uniforms: Uniforms
    settings: torch.Tensor
    text: torch.Tensor
    prompt: torch.Tensor
    root: torch.Tensor
    budget: torch.Tensor
    output: torch.Tensor
    num_output: torch.Tensor
    progress: torch.Tensor
    steps: torch.Tensor
    nan_rows: torch.Tensor

    @classmethod
    def new(cls, target: Target, room: Room, *, num_nodes: int, max_depth: int, device: torch.device) -> "DecodeState":
        """Lay out the memory.

        Args:
            target: whose cache it holds, and whose backend draws the random numbers.
            room: sizes of the generations to come.
            num_nodes: nodes of the largest tree.
            max_depth: its largest depth.
            device: the target's, or "meta" to learn how much memory it takes.
        """

        def full(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        rows = room.batch_size
        text = full(rows, room.max_prompt + room.max_new_tokens, value=-1)
        num_output = full(rows, value=0)
        uniforms = Uniforms(
            full(rows, value=0, dtype=torch.int64),
            num_output=num_output,
            num_positions=room.max_new_tokens + 1,  # a row that has finished asks for the last
            backend=target.backend,
        )
        return cls(
            room=room,
            path_length=max_depth + 1,
            cache=target.new_cache(rows, room.max_length + num_nodes, device=device),
            uniforms=uniforms,
            settings=WarpSettings().on(device).repeat(rows, 1),
            text=text,
            prompt=text[:, : room.max_prompt],
            root=full(rows, value=0),
            budget=full(rows, value=0),
            output=text[:, room.max_prompt :],
            num_output=num_output,
            progress=full(2, value=-1),
            # the prompt's token is a step too; the last place is for surplus ones
            steps=full(room.max_new_tokens + 1, 2, rows, value=0),
            nan_rows=full(rows, value=0),
        )

    @property
    def row_state(self) -> RowState:
        """What belongs to single rows, as of `Drafter.row_state`; between two steps it is all of it."""
        rows = self.settings, self.text, self.root, self.budget, self.num_output, self.nan_rows
        return self.cache, *self.uniforms.row_state, *rows

    def begin(
        self,
        prompt: Prompt,
        max_new_tokens: int | Sequence[int],
        seeds: torch.Tensor,
        settings: torch.Tensor,
        *,
        is_greedy: torch.Tensor | None = None,
    ) -> None:
        """Start a generation. Rows beyond the given seeds are padding: they have finished before they begin.

        Args:
            prompt: the prompts of all rows; a padding row has one of a single token.
            max_new_tokens: most tokens that a row may emit, or one number for each.
            seeds: [b] int64 of the real rows, the first b of B.
            settings: [1 or B, 5] float32 what is done to the logits of each row.
            is_greedy: [B] bool, rows that take the most probable token where others draw; by default none.
        """
        num_rows, width = seeds.shape[0], prompt.tokens.shape[1]
        columns = torch.arange(width, device=self.prompt.device)
        self.settings.copy_(settings)
        self.text.fill_(-1)
        self.prompt[:, :width] = torch.where(columns < prompt.lengths[:, None], prompt.tokens, -1)
        self.uniforms.seeds.zero_()
        self.uniforms.seeds[:num_rows] = seeds
        self.uniforms.step.zero_()
        most = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens)
        self.uniforms.fill_positions(most + 1, is_greedy=is_greedy)
        self.root.zero_()
        # length and budget together never grow from here on, so that no row can outgrow the memory
        asked = [max_new_tokens] if isinstance(max_new_tokens, int) else max_new_tokens
        limit = to_device(torch.tensor(asked, dtype=torch.int32), self.budget.device)
        self.budget.copy_(torch.minimum((self.room.max_length - prompt.lengths).clamp(min=0), limit))
        self.budget[num_rows:] = 0
        self.num_output.zero_()
        self.progress[0].fill_(1)
        self.progress[1].fill_(-1)
        self.steps.zero_()
        self.nan_rows.zero_()

    def emit(
        self, verdict: Verdict, deepest: torch.Tensor, has_nan: torch.Tensor, stops: torch.Tensor | None, *, grows: bool
    ) -> None:
        """Append what was emitted, end the rows that have finished, and note what the step did.

        Args:
            verdict: of the step; of the prompt, one with a path of the root alone.
            deepest: [B or 1] int32 depth of the deepest node that was proposed.
            has_nan: [B, M] bool whether there was a NaN among the logits of a place.
            stops: [E] int32 stop tokens.
            grows: whether the emitted tokens' predecessors are in the cache now, which grows by as many.
        """
        emit_step(
            verdict.num_accepted,
            verdict.emitted,
            deepest,
            has_nan,
            stops,
            self.output,
            self.num_output,
            self.root,
            self.budget,
            self.cache.lengths if grows else None,
            self.progress,
            self.uniforms.step,
            self.steps,
            self.nan_rows,
            backend=self.cache.backend,
        )

    def cut(self, row: int, kept: int, num_steps: int) -> None:
        """End a row with its first `kept` tokens, which the prompt and the first `num_steps` steps emitted.

        What later steps added is taken back too, and nothing waits for the device.
        """
        self.cache.lengths[row].sub_(self.num_output[row] - kept)
        self.output[row, kept:].fill_(-1)
        self.num_output[row].fill_(kept)
        # of a row that keeps nothing any token: the row has finished, but passes still look its embedding up
        self.root[row].copy_(self.output[row, max(kept - 1, 0)].clamp(min=0))
        self.budget[row].fill_(0)
        self.progress[0].copy_(self.budget.any())
        self.steps[num_steps + 1 :, 0, row].fill_(0)
        # the last of them, or the prompt, loses what was dropped
        self.steps[num_steps, 0, row].copy_(kept - self.steps[:num_steps, 0, row].sum())

    def tokens(self, num_rows: int) -> list[list[int]]:
        """The emitted tokens of the first rows."""
        counts = self.num_output[:num_rows].tolist()
        longest = max(counts)
        return [row[:count] for row, count in zip(self.output[:num_rows, :longest].tolist(), counts, strict=True)]

    def counts(self, num_rows: int) -> tuple[list[list[int]], list[list[int]], int]:
        """Of the first rows, tokens emitted and deepest by step, without the steps after a row had finished.

        Returns:
            Both, a list per row, and the number of steps.
        """
        num_steps = max(int(self.uniforms.step) - 1, 0)  # the prompt's is none
        emitted: list[list[int]] = [[] for _ in range(num_rows)]
        deepest: list[list[int]] = [[] for _ in range(num_rows)]
        for step_emitted, step_deepest in self.steps[1 : num_steps + 1].tolist():
            for row in range(num_rows):
                if step_emitted[row]:
                    emitted[row].append(step_emitted[row])
                    deepest[row].append(step_deepest[row])
        return emitted, deepest, num_steps

"""A stock transformers causal LM, hooked so that it scores draft trees over our KV cache. No modelling code is copied.

How: while `Target.hooked()` is active the model uses an attention function of ours, registered under the name
`specdec`; each forward pass carries a *pass* object as a keyword of `model(...)` (transformers hands unknown keywords
through to the attention function) that says where the new keys and values go and what each query may see; the cache is
an own `Cache` subclass. On the way out, also after an exception or Ctrl-C, everything is put back.

The families that were tested are listed in `families.py`. Any other decoder-only family is compared once with its own
forward pass and refused if the results differ.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.kernels.common.launch import Backend, resolve_backend
from specdec.models.common.cache import KVCache
from specdec.models.common.family import ATTENTION_NAME, register_attention
from specdec.models.common.lm_heads import LMHeads
from specdec.models.common.passes import PackedPass, PromptPass, TreePass
from specdec.models.common.placing import in_eval_mode
from specdec.models.common.products import with_few_rows
from specdec.models.target.families import FAMILIES, check_model, decoder_layers, is_decoder_and_head, sliding_window_of
from specdec.models.target.fused import FusedPath
from specdec.models.target.modules import Tap
from specdec.models.target.scores import PrefillOutput, Scores, TargetOutput
from specdec.models.target.sharding import Sharding

__all__ = ["PREFILL_CHUNK_SIZE", "PrefillOutput", "Target", "TargetOutput"]

T = TypeVar("T")
PREFILL_CHUNK_SIZE = 2048
"""Prompt tokens per row that one pass reads: enough for full speed, few enough for their states to be small."""

_WORTH_PACKING = 0.8
"""Share of a chunk that is no padding, below which it is run without."""

_LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_COMPARED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class Target:
    """A hooked model. The model itself is unchanged outside `with target.hooked():`.

    A model that transformers sharded over processes (`tp_plan="auto"`) decodes as any other, if all processes make the
    same calls; see `specdec.models.target.sharding`. `num_kv_heads` are then the heads of this process.

    Args:
        model: a decoder-only transformers model with an LM head, all on one device per process. On "meta", with the
            backend named, its steps can be counted, and nothing else.
        tap_layers: decoder layers (0-based) whose outputs drafters want beside the final state; -1 for the input of the
            first one, which is what the embedding gives.
        backend: what runs the kernels; by default decided by the device.
        fused: whether layers of the LLaMA kind score trees on the fused path (`fused.py`), which packs weights of the
            model side by side; by default on where Triton runs the kernels. On a CPU it saves no
            launches, so that nothing would be gained by it. Never for a sharded model.

    Raises:
        TypeError: `model` is no transformers model.
        ValueError: an encoder-decoder model, a model without LM head, on several devices, or with tap layers it lacks.
        NotImplementedError: a family whose attention our hook cannot reproduce.

    Attributes:
        cached_layers: layers whose keys and values a cache holds; None for all.
    """

    cached_layers: ClassVar[int | None] = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tap_layers: Sequence[int] = (),
        backend: Backend | None = None,
        fused: bool | None = None,
    ) -> None:
        check_model(model, may_lack_data=backend is not None)  # whoever names the backend may count launches
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self._asked = backend, fused
        self._place: tuple[torch.device, torch.dtype] | None = None
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.sharding = Sharding.of(model, decoder_layers(model.get_decoder()), self.head_dim)
        if self.sharding is not None:
            self.num_heads = self.num_heads // self.num_kv_heads * self.sharding.num_kv_heads
            self.num_kv_heads = self.sharding.num_kv_heads
        self.follow_model()
        head = model.get_output_embeddings()  # may be quantized: its features, if it has any, tell more than its weight
        self.hidden_size: int = getattr(head, "in_features", config.hidden_size)
        self.vocab_size: int = getattr(head, "out_features", config.vocab_size)
        self.max_positions: int = config.max_position_embeddings
        self.sliding_window: int | None = sliding_window_of(config)
        self._path: FusedPath | None = None
        self._kept: dict[int, torch.Tensor] = {}  # of the last pass: 0 the final state, 1 + n tap n
        self.tap_layers: tuple[int, ...] = ()
        self.tap(tap_layers)
        if config.model_type not in FAMILIES and model not in _COMPARED:
            self._compare_with_own_forward()
            _COMPARED.add(model)

    def follow_model(self) -> None:
        """Look up where the model is, as it may have been moved or have got another dtype."""
        model, (backend, fused) = self.model, self._asked
        device, dtype = next(model.parameters()).device, model.dtype
        if (device, dtype) != self._place:
            self._place = self.device, self.dtype = device, dtype
            self.backend: Backend = resolve_backend(torch.empty(0, device=device), backend)
            self.fused: bool = self.sharding is None and (self.backend == "triton" if fused is None else fused)

    def broadcast_from_first(self, value: T) -> T:
        """The first process's integers, where the model is sharded over several; else the value itself.

        Args:
            value: a tensor of integers or a dataclass with such tensors, as for `Sharding`.
        """
        return value if self.sharding is None else self.sharding.broadcast_from_first(value)

    def agree(self, number: int) -> int:
        """The first process's number, where the model is sharded over several; else the number itself."""
        if self.sharding is None:
            return number
        return int(self.sharding.broadcast_from_first(torch.tensor([number], device=self.device)))

    def new_cache(self, batch_size: int, capacity: int, device: torch.device | None = None) -> KVCache:
        """A zeroed cache for `batch_size` rows of `capacity` slots (tokens and tree nodes) each.

        It is on the model's device; on "meta" it takes no memory and tells its size.
        """
        return KVCache(
            num_layers=self.num_layers if self.cached_layers is None else self.cached_layers,
            batch_size=batch_size,
            capacity=capacity,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device if device is None else device,
            backend=self.backend,
        )

    def tap(self, layers: Sequence[int]) -> list[int]:
        """Let every later pass also give the outputs of these decoder layers (0-based; -1: what enters the first).

        Returns:
            Per layer, its place in the `taps` of a pass; places given out earlier stay.

        Raises:
            ValueError: a layer that the model does not have.
        """
        bad = [layer for layer in layers if not -1 <= layer < self.num_layers]
        if bad:
            expected = f"layers between 0 and {self.num_layers - 1}, or -1 for what enters the first"
            raise ValueError(f"tap_layers: expected {expected}, got {bad}")
        self.tap_layers += tuple(dict.fromkeys(layer for layer in layers if layer not in self.tap_layers))
        return [self.tap_layers.index(layer) for layer in layers]

    def locked(self) -> threading.RLock:
        """The lock of the model, which `hooked` holds too: whoever has it is the only one to run or move the model."""
        return _LOCKS.setdefault(self.model, threading.RLock())

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook the model for the duration of the block and restore it exactly, whatever ends the block.

        The model is in eval mode inside (dropout would make decoding random). Another thread that hooks the same
        model waits; other code must not run the model meanwhile.
        """
        register_attention()
        with self.locked():
            self._path = self._find_path()
            modules = list(self.model.modules()) if self._path is None else self._path.modules
            attention = self.model.config._attn_implementation
            try:
                if attention != ATTENTION_NAME:
                    self._set_attention(ATTENTION_NAME)
                with in_eval_mode(self.model, modules), self._own_forwards(), self._keeping_states():
                    yield
            finally:
                if attention != ATTENTION_NAME:
                    self._set_attention(attention)
                _own_buffers(modules)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text, by the model's own configuration."""
        ends = self.model.generation_config.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What passes read beside the model's own tensors, once it was hooked; they stay as long as the model does."""
        return () if self._path is None else self._path.tables

    def _find_path(self) -> FusedPath | None:
        """The fused path of the model as it is now, if it is to have one."""
        if not self.fused:
            return None
        if self._path is not None and self._path.holds():
            return self._path
        return FusedPath(self.model, known=self._path)

    def _own_forwards(self) -> AbstractContextManager[None]:
        """What some modules run in place of their own forward while the model is hooked."""
        if self._path is not None:
            return self._path.attached()
        return nullcontext() if self.sharding is not None else with_few_rows(self.model.get_decoder().modules())

    def _set_attention(self, name: str) -> None:
        """Choose the attention function; the official way looks at every module, for models within the model."""
        config = self.model.config
        is_flat = self.model.get_decoder().config is config and not config.sub_configs
        if self._path is not None and self._path.num_layers and is_flat:
            config._attn_implementation = name
        else:
            self.model.set_attn_implementation(name)

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> TargetOutput:
        """Run whole texts by the model's own forward pass, without a cache: what drafters learn from.

        Args:
            tokens: [B, T] int64, right-padded with any valid token.

        Returns:
            Scores, states and taps of all T tokens; column t of the scores is about token t + 1.
        """
        with self._keeping_states():
            scores = self._scores_of({"input_ids": tokens, "use_cache": False}, None)
            return TargetOutput(scores, *self._take_states())

    def prefill(
        self, tokens: torch.Tensor, lengths: torch.Tensor, cache: KVCache, *, chunk_size: int = PREFILL_CHUNK_SIZE
    ) -> PrefillOutput:
        """Run the prompt and hold the states of all its tokens; arguments as of `prefill_chunks`.

        Returns:
            Scores at each row's last token, and the states of all tokens as one chunk.
        """
        chunks = list(self.prefill_chunks(tokens, lengths, cache, chunk_size=chunk_size))
        taps = zip(*(chunk.taps for chunk in chunks), strict=True)
        hidden = torch.cat([chunk.hidden for chunk in chunks], 1)
        return PrefillOutput(chunks[-1].scores, hidden, tuple(torch.cat(tap, 1) for tap in taps))

    def prefill_chunks(
        self, tokens: torch.Tensor, lengths: torch.Tensor, cache: KVCache, *, chunk_size: int = PREFILL_CHUNK_SIZE
    ) -> Iterator[PrefillOutput]:
        """Run the prompt chunk by chunk and leave its keys and values in the cache.

        What a chunk says about its tokens is gone when the next one runs, unless the caller keeps it.

        Args:
            tokens: [B, T] int64, right-padded with any valid token.
            lengths: [B] int32 prompt lengths, at least 1.
            cache: a cache with room for T tokens per row; its lengths are set with the last chunk.
            chunk_size: tokens per pass and row, which bounds the memory of a long prompt.
        """
        if tokens.shape[1] < 1:
            raise ValueError(f"tokens: expected at least one token per row, got shape {list(tokens.shape)}")
        last = lengths.long() - 1
        ends: list[Scores] = []
        for first in range(0, tokens.shape[1], chunk_size):
            chunk = tokens[:, first : first + chunk_size]
            packed = self._packed(chunk, first, lengths)
            # for the rows whose last token lies in this chunk
            ends.append(
                self._run_chunk(chunk, first, cache, (last - first).clamp(0, chunk.shape[1] - 1))
                if packed is None
                else self._run_packed(chunk, packed, cache)
            )
            if first + chunk_size >= tokens.shape[1]:
                cache.lengths.copy_(lengths)
            scores = Scores.side_by_side(ends).at((last // chunk_size).clamp(max=len(ends) - 1))
            hidden, taps = self._take_states()
            if packed is not None:
                width = chunk.shape[1]
                hidden, taps = packed.padded(hidden, width), tuple(packed.padded(tap, width) for tap in taps)
            yield PrefillOutput(scores, hidden, taps, first=first)

    def read_chunk(self, tokens: torch.Tensor, first: int, cache: KVCache) -> None:
        """Leave the keys and values of a chunk of the prompt in the cache, whose lengths stay.

        Args:
            tokens: [B, n] int64, right-padded with any valid token.
            first: the chunk's place in the prompt; what comes before it was read already.
            cache: a cache with room for `first + n` tokens per row.
        """
        self._run_chunk(tokens, first, cache, torch.zeros(len(tokens), dtype=torch.int64, device=self.device))
        self._take_states()

    def _packed(self, chunk: torch.Tensor, first: int, lengths: torch.Tensor) -> PackedPass | None:
        """How to run a chunk without its padding; None where that is not possible or not worth it."""
        asking_is_free = self.device.type == "cpu" and self.backend == "reference"
        if not asking_is_free or self.sharding is not None or not is_decoder_and_head(self.model):
            return None
        counts = (lengths - first).clamp(0, chunk.shape[1]).tolist()
        if sum(counts) > _WORTH_PACKING * chunk.numel() or not sum(counts):
            return None
        return PackedPass(first, counts, self.device)

    def _run_packed(self, chunk: torch.Tensor, packed: PackedPass, cache: KVCache) -> Scores:
        """As `_run_chunk` at the last token of each row; of a row without one in this chunk at any."""
        scores = self._forward(packed.packed(chunk), packed.positions, packed, cache)
        return Scores(scores.heads, scores.states[0, (packed.ends - 1).clamp(min=0)][:, None])

    def _run_chunk(self, tokens: torch.Tensor, first: int, cache: KVCache, places: torch.Tensor) -> Scores:
        """A pass over tokens `first .. first + n - 1` of the prompt; scores [B, 1] at one of them per row, [B]."""
        model_pass = PromptPass(start=first, num_tokens=tokens.shape[1], batch_size=tokens.shape[0], device=self.device)
        return self._forward(tokens, model_pass.positions, model_pass, cache, places)

    def score(
        self,
        tokens: torch.Tensor,
        depth: torch.Tensor,
        ancestors: torch.Tensor,
        cache: KVCache,
        *,
        first_node: int = 0,
    ) -> TargetOutput:
        """Run nodes of a draft tree over the committed prefix; the cache's lengths do not change.

        Args:
            tokens: [B, N] tokens of the nodes.
            depth: [B or 1, N] int32 distance of each node from slot `lengths[b]`, which is its position.
            ancestors: [B or 1, N, W] int32 words: bit j says that the node may attend to tree slot j.
            cache: cache with room for `first_node + N` slots beyond each row's length.
            first_node: tree slot of the first of these nodes; a drafter scores a tree level by level.
        """
        tree_pass = TreePass(
            lengths=cache.lengths,
            depth=depth,
            ancestors=ancestors,
            first_node=first_node,
            num_nodes=tokens.shape[1],
            backend=self.backend,
            fused=self.fused,
        )
        positions = None if self._path is None else self._path.begin(tree_pass)
        if positions is None:
            # nodes past the last position can never be accepted; clamping keeps learned position tables in range
            positions, tokens = tree_pass.positions.clamp(max=self.max_positions - 1), tokens.long()
        scores = self._forward(tokens, positions, tree_pass, cache)
        return TargetOutput(scores, *self._take_states())

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        model_pass: PackedPass | PromptPass | TreePass,
        cache: KVCache,
        places: torch.Tensor | None = None,
    ) -> Scores:
        """Run a pass, without the LM head if nothing else follows it.

        Returns:
            Scores [B, 1] at one place [B] of each row's tokens, by default at all: logits that are there already if the
            model decides itself what becomes of its states.
        """
        cache.begin_pass(model_pass)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
            "specdec_pass": model_pass,
        }
        return self._scores_of(inputs, places)

    def _scores_of(self, inputs: dict[str, Any], places: torch.Tensor | None) -> Scores:
        """Scores at one place of each row, or at all, of what the model is given."""
        is_split = self.sharding is not None and not self.sharding.is_gathered
        if not is_split and is_decoder_and_head(self.model):
            scores = Scores(self.lm_heads, self.model.get_decoder()(**inputs)[0])
            return scores if places is None else scores.at(places)
        if places is None:
            return Scores.of(self.model(logits_to_keep=0, **inputs).logits)
        columns, column_of_row = torch.unique(places, return_inverse=True)
        return Scores.of(self.model(logits_to_keep=columns, **inputs).logits).at(column_of_row)

    @property
    def lm_heads(self) -> LMHeads:
        """The model's LM head."""
        return LMHeads.of(self.model.get_output_embeddings(), backend=self.backend)

    @contextmanager
    def _keeping_states(self) -> Iterator[None]:
        """Keep the final state and the tapped layers' outputs of every pass inside the block."""
        decoder = self.model.get_decoder()
        layers = decoder_layers(decoder)
        with ExitStack() as stack:
            stack.callback(self._kept.clear)
            stack.enter_context(decoder.register_forward_hook(Tap(self._kept, 0), with_kwargs=True))
            for place, layer in enumerate(self.tap_layers, start=1):
                tap = Tap(self._kept, place, of_input=layer < 0)
                stack.enter_context(layers[max(layer, 0)].register_forward_hook(tap, with_kwargs=True))
            yield

    def _take_states(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The final state and the taps of the last pass; empties the keep."""
        hidden, *taps = (self._kept[place] for place in sorted(self._kept))
        self._kept.clear()
        return hidden, tuple(taps)

    @torch.no_grad()
    def _compare_with_own_forward(self) -> None:
        """Refuse a family whose hooked logits differ from its own."""
        family = self.model.config.model_type
        length = min(12, self.max_positions)
        tokens = torch.arange(1, length + 1, device=self.device)[None] % self.vocab_size
        refusal = f"model: the {family} family is not supported (checked families: {', '.join(FAMILIES)})"
        if self.sliding_window is not None:
            raise NotImplementedError(f"{refusal}: sliding window attention was checked for those families only")
        with self.hooked():
            try:
                cache = self.new_cache(1, length)
                lengths = torch.full((1,), length, dtype=torch.int32, device=self.device)
                hooked = self.prefill(tokens, lengths, cache).logits.float()
            except NotImplementedError as error:
                raise NotImplementedError(f"{refusal}: {error}") from error
            except (TypeError, RuntimeError, AttributeError, IndexError, KeyError) as error:
                raise NotImplementedError(f"{refusal}: its forward pass failed under the hook: {error}") from error
        with in_eval_mode(self.model):
            own = self.model(tokens, use_cache=False).logits[:, -1].float()
        difference = (hooked - own).abs().max().item()
        allowed = 64 * torch.finfo(self.dtype).eps * own.abs().max().clamp(min=1.0).item()
        if not difference <= allowed:
            raise NotImplementedError(
                f"{refusal}: its hooked logits differ from its own by {difference:.3g}, more than {allowed:.3g}"
            )


def _own_buffers(modules: Sequence[nn.Module]) -> None:
    """Replace buffers that a pass without autograd made (scaled rotary tables) by ones that training can use."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                with torch.inference_mode(False):
                    module._buffers[name] = buffer.clone()

"""Every drafter with a network proposes the same tree by the kernels, in the interpreter, as by PyTorch on a CPU."""

import pytest
import torch

from lib.drafter_checks import begin
from lib.families import VOCAB_SIZE, build_model, random_prompts
from specdec.drafters.amphista import Amphista
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.dspark import DSpark
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.falcon import Falcon
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallelspec import ParallelSpec
from specdec.drafting.base import Prompt
from specdec.drafting.candidates import Best
from specdec.models.common import lm_heads
from specdec.models.networks import amphista, falcon, hydra, medusa
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

pytestmark = pytest.mark.interpreter

SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 1], [0, 0, 0]])
DYNAMIC = DynamicTree(num_nodes=8, depth=2, top_k=3)
BLOCK = {"num_layers": 2, "block_size": 4, "tap_layers": (0, 2), "markov_rank": 8}
CASES = {
    "medusa": (Medusa, {"num_heads": 3, "num_layers": 2}, SHAPE),
    "medusa with the target's head": (Medusa, {"num_heads": 3, "vocab_size": None}, SHAPE),
    "hydra": (Hydra, {"num_heads": 3, "num_layers": 2}, SHAPE),
    "hydra++": (Hydra, {"num_heads": 3, "prefix_attention": True}, SHAPE),
    "amphista": (Amphista, {"num_heads": 3}, SHAPE),
    "amphista, low rank": (Amphista, {"num_heads": 3, "head_rank": 8}, SHAPE),
    "parallelspec, eagle": (ParallelSpec, {"variant": "eagle", "num_masks": 2}, SHAPE),
    "parallelspec, medusa": (ParallelSpec, {"variant": "medusa", "num_masks": 2}, SHAPE),
    "eagle": (Eagle, {}, SHAPE),
    "eagle, dynamic": (Eagle, {}, DYNAMIC),
    "eagle3": (Eagle3, {"tap_layers": (0, 1, 2)}, SHAPE),
    "eagle3, dynamic": (Eagle3, {"tap_layers": (0, 2), "draft_vocab_size": 50}, DYNAMIC),
    "falcon": (Falcon, {"block_size": 2}, SHAPE),
    "dspark": (DSpark, {**BLOCK, "markov_head_type": "gated"}, SHAPE),
    "dspark, grown": (DSpark, {**BLOCK, "markov_head_type": "rnn", "tap_layers": (-1, 1)}, DYNAMIC),
}


@torch.no_grad()
def propose(drafter, target, texts, roots):
    """The first tree behind ragged texts."""
    drafter.bind(target)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    prompt = Prompt(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths, max_length=int(max(lengths)) + 1)
    with target.hooked(), drafter.session():
        cache = target.new_cache(len(texts), prompt.max_length)
        begin(drafter, prompt, target.prefill(prompt.tokens, lengths, cache))
        return drafter.draft(torch.tensor(roots, dtype=torch.int32), Best())


@pytest.mark.parametrize(("drafter_class", "settings", "shape"), CASES.values(), ids=CASES)
def test_the_kernels_propose_the_same_tree(drafter_class, settings, shape, generator, monkeypatch):
    model = build_model("llama")
    network_class = drafter_class.network_class
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = network_class(network_class.config_class.for_target(model.config, **settings)).eval()
        for parameter in network.parameters():
            parameter.data.normal_(std=0.3)
    drafter = drafter_class(network, shape)
    texts = random_prompts(generator, [7, 4])
    expected = propose(drafter, Target(model, backend="reference"), texts, [5, 9])
    calls = []

    def count(module, name):
        op = getattr(module, name)

        def counted(*args, **kwargs):
            assert kwargs["backend"] == "triton"
            calls.append(name)
            return op(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(lm_heads, "lm_head_topk")
    count(medusa, "draft_heads")
    count(amphista, "draft_heads")
    count(hydra, "draft_heads_concat")
    count(falcon, "lstm_recurrence")
    got = propose(drafter, Target(model, backend="triton"), texts, [5, 9])
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.parent, expected.parent)
    assert torch.equal(got.ancestors, expected.ancestors)
    also = {"falcon": ["lstm_recurrence"], "hydra": ["draft_heads_concat"], "medusa": ["draft_heads"]}
    also |= {"hydra++": also["hydra"], "amphista": also["medusa"]}
    assert set(calls) == {"lm_head_topk", *also.get(drafter.kind, [])}


@pytest.mark.parametrize("missing", [-1, 0, 6])
def test_a_draft_model_writes_no_logits_whatever_its_vocabulary(missing, generator, monkeypatch):
    model, small = build_model("llama"), build_model("llama", seed=1)
    small.resize_token_embeddings(VOCAB_SIZE - missing)
    drafter, texts = DraftModel(small, TreeShape.from_k_config((3, 2))), random_prompts(generator, [7, 4])
    expected = propose(drafter, Target(model, backend="reference"), texts, [5, 9])
    with monkeypatch.context() as patch:
        patch.setattr(lm_heads.LMHeads, "logits", None)
        got = propose(drafter, Target(model, backend="triton"), texts, [5, 9])
    assert torch.equal(got.tokens, expected.tokens)

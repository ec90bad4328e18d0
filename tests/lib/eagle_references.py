"""Heads of EAGLE-3's family as speculators have them, with random weights that all matter, and what they compute."""

import torch

from lib.references import reference

VOCAB, DRAFT_VOCAB, WIDTH, LENGTH = 48, 20, 24, 18
DRAFT_TOKENS = torch.arange(0, 2 * DRAFT_VOCAB, 2) + 1
MASK = VOCAB - 2
CASES = {
    "llama": {},
    "qwen3, norm before residual": {"layer": "qwen3", "norm_before_residual": True},
    "two layers": {"num_layers": 2, "norm_output": True, "fc_norm": True},
    "two layers of qwen3": {"layer": "qwen3", "num_layers": 2, "norm_before_fc": True, "ids": (1, 2, 3, 4)},
    "windows": {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "whole vocabulary": {"draft_vocab": VOCAB, "ids": (0, 3)},
}
"""By name, switches of `their_model`."""


def their_model(kind, *, layer="llama", num_layers=1, ids=(1, 2, 4), draft_vocab=DRAFT_VOCAB, **switches):
    """Their `eagle3` or `peagle`, ready to be saved."""
    theirs = reference(f"speculators.models.{kind}")
    import transformers

    of_layer = {name: switches.pop(name) for name in ("layer_types", "sliding_window") if name in switches}
    sizes = (transformers.Qwen3Config if layer == "qwen3" else transformers.LlamaConfig)(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        pad_token_id=None,
        **({"use_sliding_window": True} if of_layer and layer == "qwen3" else {}),
    )
    for name, value in of_layer.items():
        setattr(sizes, name, value)
    sizes._attn_implementation = "eager"
    if kind == "peagle":
        switches["mask_token_id"] = MASK
    name = {"eagle3": "Eagle3", "peagle": "PEagle"}[kind]
    config = getattr(theirs, f"{name}SpeculatorConfig")(
        transformer_layer_config=sizes,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(ids),
        speculators_config=_proposal(kind),
        **{"norm_before_residual": False, **switches},
    )
    model = getattr(theirs, f"{name}DraftModel")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm" in parameter_name))
        if draft_vocab < VOCAB:
            model.d2t.copy_(DRAFT_TOKENS - torch.arange(DRAFT_VOCAB))
            model.t2d.zero_()[DRAFT_TOKENS] = True
    return model


def _proposal(kind):
    config, proposals = reference("speculators.config"), reference("speculators.proposals.greedy")
    return config.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy",
        verifier=config.VerifierConfig(name_or_path="a/verifier", architectures=["LlamaForCausalLM"]),
    )


@torch.no_grad()
def their_logits(model, features, tokens, groups=None, members=None):
    """Their logits over the draft vocabulary, before any token is drafted.

    Args:
        model: of `their_model`.
        features: [1, T, F] states of the target.
        tokens: [1, T] the token after each.
        groups: [N] of their masks, the pair each belongs to; P-EAGLE alone.
        members: [N] place of each in its group, from 1.

    Returns:
        [1, T, V], or [1, T + N, V].
    """
    kept = []
    handle = model.lm_head.register_forward_hook(lambda _module, _args, output: kept.append(output))
    documents = torch.zeros_like(tokens)
    try:
        if groups is None:
            model(features, tokens, documents, ttt_steps=1)
        else:
            _run_groups(model, features, tokens, groups, members)
    finally:
        handle.remove()
    return kept[0].float()


def _run_groups(model, features, tokens, groups, members):
    """Their forward over these groups instead of those that it would draw."""
    core = reference("speculators.models.peagle.core")
    pairs = torch.arange(tokens.shape[1])
    rows = torch.cat((pairs, groups)), torch.cat((torch.zeros_like(pairs), members))
    drawn, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: rows
    measured, core.compute_metrics = core.compute_metrics, lambda **_: (None, {})
    hidden = features.new_zeros(*tokens.shape, WIDTH)
    try:
        # masks of the last pairs stand behind the text; theirs reads a token there and drops it
        model(
            torch.nn.functional.pad(features, (0, 0, 0, 8)),
            torch.nn.functional.pad(tokens, (0, 8)),
            torch.zeros(1, tokens.shape[1] + 8, dtype=torch.long),
            verifier_last_hidden_states=torch.nn.functional.pad(hidden, (0, 0, 0, 8)),
        )
    finally:
        core.generate_cod_sample_indices, core.compute_metrics = drawn, measured

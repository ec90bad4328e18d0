"""How often one of k candidates at a node is accepted, computed from the laws p and q with nothing decoded.

Source: MCSD (arXiv:2401.06706), figure 3, algorithms 1 and 2. With replacement the law that is left after i refusals
does not depend on what was refused, so that the rate is exact: 1 - prod_i (1 - sum_x min(p_i(x), q(x))). Without
replacement it does. There the candidate that is refused is drawn from its own law, max(q_i - p_i, 0) normalised, and
the product of what each next one is refused with is the chance that all are, exactly in the mean. With temperature 0 a
candidate is accepted if it is the target's best token: the rate is how often that is among the k best of the drafter.
"""

from collections.abc import Sequence

import torch

from specdec.evaluation.replay import RecordedText
from specdec.loop.rules import AcceptanceRule, Greedy, Rejection
from specdec.models.common.lm_heads import LMHeads, best_of
from specdec.models.target.target import Target

__all__ = ["MAX_CANDIDATES", "acceptance_by_rank", "rates_at_zero", "rates_of_drawn"]

MAX_CANDIDATES = 32


@torch.no_grad()
def acceptance_by_rank(
    target: Target,
    draft: Target,
    texts: Sequence[RecordedText],
    *,
    num_contexts: int,
    rule: AcceptanceRule,
    temperature: float,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Acceptance rates of 1 to `MAX_CANDIDATES` candidates after places of recorded texts.

    Args:
        target: what was recorded.
        draft: the draft model.
        texts: recorded texts.
        num_contexts: places per text, spread evenly over its new tokens; fewer where it is shorter.
        rule: `Rejection` with candidates that are drawn, or `Greedy` at temperature 0.
        temperature: of both laws.
        seed: of the candidates that are drawn.

    Returns:
        Per text, [places, MAX_CANDIDATES] float64.
    """
    if not isinstance(rule, Rejection) and not (isinstance(rule, Greedy) and temperature == 0):
        raise ValueError(f"rule: expected rejection, or greedy at temperature 0, got {rule!r} at {temperature}")
    generator = torch.Generator(target.device).manual_seed(seed)
    heads = LMHeads.of(target.model.get_output_embeddings(), backend="reference")
    vocab_size = min(target.vocab_size, draft.vocab_size)
    found = []
    for text in texts:
        num_new = text.new.shape[0]
        steps = sorted({place * num_new // num_contexts for place in range(num_contexts)})
        places = torch.tensor([text.prompt.shape[0] - 1 + step for step in steps])
        tokens = torch.cat((text.prompt, text.new))[None, :-1].to(draft.device)
        logits = heads.logits(text.hidden[places][None])[0, :, :vocab_size].float()
        drafted = draft.model(input_ids=tokens, use_cache=False, logits_to_keep=places.to(draft.device)).logits
        guesses = drafted[0, :, :vocab_size].float()
        if isinstance(rule, Rejection):
            laws = (one.div(temperature).softmax(-1) for one in (logits, guesses))
            found.append(rates_of_drawn(*laws, replacement=rule.replacement, generator=generator))
        else:
            found.append(rates_at_zero(logits, guesses))
    return found


def rates_at_zero(logits: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """[n, MAX_CANDIDATES] float64 whether the target's best token is among the best 1, 2, ... of the drafter's.

    Args:
        logits: [n, V] the target's.
        guesses: [n, V] the drafter's.
    """
    best = best_of(logits, 1)
    ranked = best_of(guesses, min(MAX_CANDIDATES, guesses.shape[-1]))
    hits = (ranked == best).double().cumsum(-1)
    return torch.cat((hits, hits[:, -1:].expand(-1, MAX_CANDIDATES - hits.shape[1])), -1)


def rates_of_drawn(p: torch.Tensor, q: torch.Tensor, *, replacement: bool, generator: torch.Generator) -> torch.Tensor:
    """[n, MAX_CANDIDATES] float64 chance that one of the first 1, 2, ... drawn candidates is accepted.

    Args:
        p: [n, V] the target's laws.
        q: [n, V] the laws that candidates are drawn from.
        replacement: whether candidates are independent draws: then the rates are exact, else true in the mean.
        generator: draws the refused candidates, in the latter case.
    """
    all_refused = p.new_ones(p.shape[0], dtype=torch.float64)
    rates = []
    for _ in range(MAX_CANDIDATES):
        accepted = torch.minimum(p, q).sum(-1).double().clamp(max=1)
        all_refused = all_refused * (1 - accepted)
        rates.append(1 - all_refused)
        if not replacement:
            refused = (q - p).clamp(min=0)
            # where nothing can be refused, nothing is: any token does
            drawn = torch.where(refused.sum(-1, keepdim=True) > 0, refused, q).multinomial(1, generator=generator)
        p = _normalised((p - q).clamp(min=0), p)
        if not replacement:
            q = _normalised(q.scatter(-1, drawn, 0.0), q)
    return torch.stack(rates, -1)


def _normalised(mass: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """[n, V] masses as laws; a row without mass is `otherwise`."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp(min=torch.finfo(mass.dtype).tiny), otherwise)

"""What the five papers claim of acceptance, one row per claim.

A claim compares two arms and says which one has the larger figure. Speeds are not among them: they belong to a machine,
and `specdec.bench.decode` has them. Where a paper gives a speed alone for what it says of acceptance, the row says so.
Lengths count the next root unless the row says otherwise (docs/glossary.md).
"""

from dataclasses import dataclass, replace
from math import sqrt

from specdec.bench.claims.arms import Arm
from specdec.evaluation.intervals import Sign
from specdec.loop.rules import Greedy, Naive, Rejection, Typical

__all__ = ["CLAIMS", "Claim"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        text: what is claimed of `ours` over `theirs`.
        paper: the paper's own figures, with their model.
        sign: of the ratio of ours to theirs.
        ours: the arm that the claim is about.
        theirs: what it is compared with.
        why: what decides the outcome, or what this comparison can and cannot say.
        margin: how far apart two arms may be that are claimed to be equal.
        presupposes: a claim without which this one says nothing.
    """

    text: str
    paper: str
    sign: Sign
    ours: Arm
    theirs: Arm
    why: str
    margin: float = 0.02
    presupposes: "Claim | None" = None


_MCSS, _WITH, _MCNS = Rejection(), Rejection(replacement=True), Naive(drawn=True)


def _draft(*tree: int, rule: Rejection | Naive = _MCSS) -> Arm:
    """A draft model that samples at temperature 1."""
    return Arm("draft_model", tree, rule, 1.0)


def _rate(num_candidates: int, rule: Rejection | None = None) -> Arm:
    """Acceptance rate of a draft model: at temperature 1 with a rule, at 0 without."""
    arm = Arm("draft_model", None, rule or Greedy(), 0.0 if rule is None else 1.0)
    return replace(arm, figure="acceptance rate", num_candidates=num_candidates)


def _typical(drafter: str, threshold: float) -> Arm:
    """Hydra's section 6.3: temperature 0.7, alpha = sqrt(threshold), and roots that are drawn."""
    return Arm(drafter, rule=Typical(threshold, sqrt(threshold), root="sampled"), temperature=0.7)


_MCSD = (
    Claim(
        "Several candidates are accepted longer than a chain, T = 1",
        "4x2x2 2.45, chain 1.93 (LLaMA-13B)",
        "more",
        _draft(4, 2, 2),
        _draft(1, 1, 1),
        "A second candidate is tried wherever the first is refused, with what is left of the law.",
    ),
    Claim(
        "Several candidates are accepted longer than a chain, T = 0",
        "8x2 2.18, chain 1.72 (Vicuna-13B)",
        "more",
        Arm("draft_model", (8, 2)),
        Arm("draft_model", (1, 1)),
        "The tree contains the chain, so that at T = 0 it can only be longer; the size is what is measured.",
    ),
    Claim(
        "Candidates drawn without replacement are accepted longer than with",
        "2.45 over 2.39 (LLaMA-13B)",
        "more",
        _draft(4, 2, 2),
        _draft(4, 2, 2, rule=_WITH),
        "Repeated candidates are lost ones; the sharper the draft law, the more of them.",
    ),
    Claim(
        "Multi-candidate sampling (MCSS) is accepted longer than naive sampling (MCNS)",
        "2.45 over 1.52 (LLaMA-13B)",
        "more",
        _draft(4, 2, 2),
        _draft(4, 2, 2, rule=_MCNS),
        "The naive rule draws the target's token without looking at the candidates' laws.",
    ),
    Claim(
        "With replacement, too, MCSS is accepted longer than MCNS",
        "2.39 over 1.52 (LLaMA-13B)",
        "more",
        _draft(4, 2, 2, rule=_WITH),
        _draft(4, 2, 2, rule=_MCNS),
        "The bound of its appendix C has candidates with replacement on both sides; here MCNS has distinct ones.",
    ),
    Claim(
        "A falling k_config beats the rising one of the same budget of 8",
        "4x2 over 2x4 (figure 4)",
        "more",
        _draft(4, 2),
        _draft(2, 4),
        "Depth 2 is only reached through depth 1.",
    ),
    Claim(
        "A falling k_config beats the rising one of the same budget of 16",
        "8x2 over 2x8 (figure 4)",
        "more",
        _draft(8, 2),
        _draft(2, 8),
        "As above.",
    ),
    Claim(
        "Falling k_configs of one budget are about as good as each other",
        "16-budget group of figure 4; no figures",
        "equal",
        _draft(8, 2),
        _draft(4, 2, 2),
        "Equal is taken to be within 5 %. Depth pays where acceptance is high, width where it is low.",
        margin=0.05,
    ),
    Claim(
        "The acceptance rate grows with the number of candidates, T = 1",
        "0.35 to 0.57 (Vicuna-13B, k = 1 and 32)",
        "more",
        _rate(32, _MCSS),
        _rate(1, _MCSS),
        "Computed from both laws at places of greedy texts; the paper's places are of sampled ones.",
    ),
    Claim(
        "The acceptance rate grows with the number of candidates, T = 0",
        "0.49 to 0.67 (Vicuna-13B, k = 1 and 32)",
        "more",
        _rate(32),
        _rate(1),
        "How often the target's best token is among the drafter's 32 best, against its best one.",
    ),
    Claim(
        "Most of the growth comes from few candidates: 16 have nearly the rate of 32",
        "curves converge from 32 on (figure 3)",
        "equal",
        _rate(32, _MCSS),
        _rate(16, _MCSS),
        "Equal is taken to be within 5 %. A weak draft model at T = 1 gains from every further candidate.",
        margin=0.05,
    ),
    Claim(
        "Greedy decoding accepts more than sampling: chain, T = 0 over T = 1",
        "1.97 over 1.53 (Vicuna-33B)",
        "more",
        Arm("draft_model", (1, 1, 1), is_short=True),
        _draft(1, 1, 1),
        "A sharp law is easier to hit than its draws; both arms on as many prompts and tokens.",
    ),
    Claim(
        "Tree attention needs fewer target nodes per token than candidates in rows of their own",
        "1.91x over 1.61x in speed, lengths alike (LLaMA-13B)",
        "less",
        Arm("draft_model", (4, 2, 2), _MCSS, 1.0, figure="nodes per token"),
        Arm("draft_model", (4, 2, 2), _MCSS, 1.0, figure="path nodes per token"),
        "Arithmetic: the law of a token does not depend on which rows share a pass, 29 nodes stand for 16 paths of 4.",
    ),
)

_HYDRA = (
    Claim(
        "Hydra is accepted longer than Medusa",
        "1.11x in speed; lengths in figure 2 (Vicuna-7B)",
        "more",
        Arm("hydra"),
        Arm("medusa"),
        "Its heads know the tokens before their own.",
    ),
    Claim(
        "Hydra++ is accepted longer than Hydra",
        "1.14x in speed; lengths in figure 2 (Vicuna-7B)",
        "more",
        Arm("hydra++"),
        Arm("hydra"),
        "Deeper heads, the target's law as their teacher, and a layer over the text.",
    ),
    Claim(
        "The target's law teaches better than the text",
        "1.04x in speed; lengths in figure 5",
        "more",
        Arm("short-hydra-teacher"),
        Arm("short-hydra"),
        "Short trainings of equal length; on texts that the target wrote itself the two teachers agree more than on "
        "the paper's.",
    ),
    Claim(
        "Noise on the states shortens acceptance",
        "any noise degrades it (figure 5)",
        "less",
        Arm("short-hydra-noise"),
        Arm("short-hydra"),
        "Short trainings of equal length, alpha 75.",
    ),
    Claim(
        "Prefix attention lengthens acceptance",
        "1.12x in length (Vicuna-7B)",
        "more",
        Arm("short-hydra-prefix"),
        Arm("short-hydra"),
        "Short trainings of equal length; a layer learns more slowly than heads.",
    ),
    Claim(
        "A larger tree is accepted longer: the common one over 2x1x1",
        "figures 7 to 9; no figures",
        "more",
        Arm("hydra++"),
        Arm("hydra++", (2, 1, 1)),
        "The common tree contains the smaller; the size is what is measured.",
    ),
    Claim(
        "Typical acceptance: a higher threshold accepts less, 0.25 under 0.05",
        "slightly shorter (figure 4)",
        "less",
        _typical("hydra++", 0.25),
        _typical("hydra++", 0.05),
        "LOSSY. Temperature 0.7, alpha the root of the threshold, roots drawn.",
    ),
    Claim(
        "Typical acceptance: Hydra++ is accepted longer than Medusa at threshold 0.15",
        "at every threshold (figure 4)",
        "more",
        _typical("hydra++", 0.15),
        _typical("medusa", 0.15),
        "LOSSY, as above; the arms write different texts.",
    ),
    Claim(
        "Typical acceptance accepts more than rejection at the same temperature",
        "its purpose (section 6.3); no figures",
        "more",
        _typical("hydra++", 0.15),
        Arm("hydra++", rule=_MCSS, temperature=0.7),
        "LOSSY: what it accepts beyond is no longer the target's law.",
    ),
)


def _amphista(text: str, paper: str, drafter: str, why: str = "Short trainings of equal length.") -> Claim:
    """A row of Amphista's table 5: MT-Bench, Vicuna-7B."""
    return Claim(text, paper, "more", Arm("short-amphista"), Arm(f"short-amphista-{drafter}"), why)


_AMPHISTA = (
    Claim(
        "Amphista is accepted longer than Medusa",
        "3.50 over 2.52 (Vicuna-7B)",
        "more",
        Arm("amphista"),
        Arm("medusa"),
        "Its heads see the sampled token and each other.",
    ),
    Claim(
        "Hydra++ is accepted a little longer than Amphista",
        "3.58 over 3.50 (Vicuna-7B)",
        "more",
        Arm("hydra++"),
        Arm("amphista"),
        "On average over Spec-Bench both have 2.98: the paper's own order depends on the task.",
    ),
    _amphista("The auto-embedding block lengthens acceptance", "3.50 over 3.16", "no-block"),
    _amphista("Position encoding lengthens acceptance a little", "3.50 over 3.47", "no-positions"),
    _amphista("Staged adaptation lengthens acceptance", "3.50 over 2.91", "no-adaptation"),
    _amphista("Two adaptation layers are better than one", "3.50 over 3.36", "one-layer"),
    _amphista("The sampled token lengthens acceptance", "3.50 over 3.11", "no-token"),
    Claim(
        "LM heads of low rank lose little",
        "1.01x to 1.02x in speed at rank 256",
        "equal",
        Arm("short-amphista-low-rank"),
        Arm("short-amphista-own-heads"),
        "The paper gives speed alone, in which smaller heads are cheaper; here the rank is 64. Equal is within 5 %.",
        margin=0.05,
    ),
)

_MORE_MASKS = Claim(
    "More masks lengthen acceptance: K = 4 over K = 1",
    "figure 4; no figures",
    "more",
    Arm("short-parallelspec-5-masks", (1,) * 5),
    Arm("short-parallelspec-5-masks", (1,) * 2),
    "A short training with five masks, the last of which are left out; the paper trains one per K. In so short a "
    "training later masks may never come to be right.",
)

_PARALLELSPEC = (
    Claim(
        "In the place of Medusa's heads it is accepted longer",
        "3.31 over 2.39 (Vicuna-7B)",
        "more",
        Arm("parallelspec_medusa"),
        Arm("medusa"),
        "A layer over the text with masks, against heads on one state, which learn sooner.",
    ),
    Claim(
        "In the place of EAGLE's passes it is accepted a little shorter",
        "3.52 under 3.58 (Vicuna-7B)",
        "less",
        Arm("parallelspec"),
        Arm("eagle"),
        "Masks do not see what was drafted before them; the pass that this saves is no matter of acceptance.",
    ),
    _MORE_MASKS,
    Claim(
        "The growth saturates: K = 5 has little over K = 4",
        "saturates after K = 4 (figure 4)",
        "equal",
        Arm("short-parallelspec-5-masks", (1,) * 6),
        Arm("short-parallelspec-5-masks", (1,) * 5),
        "As above. Equal is taken to be within 5 %; a weaker drafter saturates earlier.",
        margin=0.05,
        presupposes=_MORE_MASKS,
    ),
    Claim(
        "Texts that the target wrote teach better than foreign ones",
        "3.78 over 3.49 (LLaMA-2-7B)",
        "more",
        Arm("short-parallelspec-rewritten"),
        Arm("short-parallelspec-foreign"),
        "Short trainings of equal length, on two answers to each of the same prompts.",
    ),
)

_FALCON = (
    Claim(
        "Blocks of 2 are accepted longer than blocks of 3",
        "3.34 over 2.52 (Vicuna-7B, without the next root)",
        "more",
        Arm("short-falcon", None),
        Arm("short-falcon-3", None),
        "Short trainings of equal length, each with its own tree.",
    ),
    Claim(
        "Blocks of 3 are accepted longer than blocks of 4",
        "2.52 over 2.35 (Vicuna-7B, without the next root)",
        "more",
        Arm("short-falcon-3", None),
        Arm("short-falcon-4", None),
        "As above.",
    ),
    Claim(
        "A tree is accepted longer than a chain of its height",
        "3.34 over 2.13 (Vicuna-7B, without the next root)",
        "more",
        Arm("falcon"),
        Arm("falcon", (1, 1, 1, 1)),
        "The tree contains the chain; the size is what is measured.",
    ),
    Claim(
        "Glancing lengthens acceptance",
        "3.34 over 2.78 (Vicuna-7B, without the next root)",
        "more",
        Arm("short-falcon", None),
        Arm("short-falcon-no-glance", None),
        "Short trainings of equal length; glancing needs a drafter that is right often enough to be shown little.",
    ),
    Claim(
        "Falcon is accepted longer than Medusa",
        "3.34 over 1.51 (Vicuna-7B, without the next root)",
        "more",
        Arm("falcon"),
        Arm("medusa"),
        "Its passes know what they drafted.",
    ),
    Claim(
        "Falcon is accepted longer than EAGLE",
        "3.37 over 2.91 (Vicuna-13B, without the next root); 3.34 under 3.94 (7B)",
        "more",
        Arm("falcon"),
        Arm("eagle"),
        "The paper's own models disagree; three of its four say more. Its LSTM learns more slowly than EAGLE's layer.",
    ),
)

_BETWEEN = (
    Claim(
        "EAGLE is accepted longer than Medusa",
        "3.84 over 2.52 (Amphista, table 9, Vicuna-7B)",
        "more",
        Arm("eagle"),
        Arm("medusa"),
        "A pass per depth that knows its own tokens.",
    ),
    Claim(
        "EAGLE is accepted longer than Hydra++",
        "figure 10 of Hydra; 3.84 over 3.58 (Amphista, Vicuna-7B)",
        "more",
        Arm("eagle"),
        Arm("hydra++"),
        "A layer's pass per depth against one in all.",
    ),
    Claim(
        "EAGLE is accepted longer than a draft model's chain",
        "3.58 over 2.27 (ParallelSpec, Vicuna-7B)",
        "more",
        Arm("eagle"),
        Arm("draft_model", (1, 1, 1, 1)),
        "Each with what its paper drafts; a draft model that grows passes EAGLE and costs more.",
    ),
    Claim(
        "EAGLE is accepted longer than prompt lookup",
        "3.58 over 1.75 (ParallelSpec, Vicuna-7B)",
        "more",
        Arm("eagle"),
        Arm("prompt_lookup"),
        "Prompts that ask for new text repeat little of themselves; summaries and answers from passages repeat much.",
    ),
    Claim(
        "EAGLE accepts less at T = 1 than at T = 0",
        "3.18 under 3.58 (ParallelSpec, Vicuna-7B)",
        "less",
        Arm("eagle", rule=_MCSS, temperature=1.0),
        Arm("eagle", is_short=True),
        "Both arms on as many prompts and tokens.",
    ),
    Claim(
        "ParallelSpec accepts less at T = 1 than at T = 0",
        "3.09 under 3.52 (Vicuna-7B)",
        "less",
        Arm("parallelspec", rule=_MCSS, temperature=1.0),
        Arm("parallelspec", is_short=True),
        "As above.",
    ),
)

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "MCSD": _MCSD,
    "Hydra": _HYDRA,
    "Amphista": _AMPHISTA,
    "ParallelSpec": _PARALLELSPEC,
    "Falcon": _FALCON,
    "Between kinds": _BETWEEN,
}
"""Everything that is tested, by section."""

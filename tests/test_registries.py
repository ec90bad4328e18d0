"""Every drafter and every acceptance rule is everywhere: what lists them is compared, and what is missing is named."""

import re
from pathlib import Path

import pytest

import specdec.kernels
from lib.law_drafters import DRAFTERS, SAMPLING_RULES, make_drafter
from specdec.bench.decoding.simulated import DRAFTERS as RANDOM_DRAFTERS
from specdec.bundled.load import bundled_drafters
from specdec.drafters.kinds import DRAFTER_KINDS, KINDS_WITHOUT_WEIGHTS, NETWORK_KINDS, drafter_class
from specdec.loop.rules import RULES
from specdec.training.kinds import TRAINABLE_KINDS
from specdec.training.tiny_drafters import TINY_DRAFTERS

ROOT = Path(__file__).parents[1]
WITHOUT_WEIGHTS = frozenset(KINDS_WITHOUT_WEIGHTS)

# Of drafters, by variant: a kind, or what is trained and bundled under a name of its own. Per place those that are in
# it, as the file and the name there, and those that need not be.
VARIANTS = (*DRAFTER_KINDS, *(name for name in TINY_DRAFTERS if name not in DRAFTER_KINDS))
PLACES = {
    "tests/lib/law_drafters.py (DRAFTERS)": ({*DRAFTERS, *(make_drafter(name).kind for name in DRAFTERS)}, set()),
    "bench/decoding/simulated.py (DRAFTERS)": (RANDOM_DRAFTERS.keys(), {"none"}),
    "specdec/training/tiny_drafters.py (TINY_DRAFTERS)": (TINY_DRAFTERS.keys(), WITHOUT_WEIGHTS),
    "specdec/bundled/tiny (a folder that specdec train-tiny writes)": (
        bundled_drafters(),
        WITHOUT_WEIGHTS,
    ),
}
RULE_PLACES = {
    "tests/lib/law_drafters.py (SAMPLING_RULES)": (
        {rule.name for rule in SAMPLING_RULES.values()},
        {name for name, rule in RULES.items() if not (rule.lossless and rule().samples)},
    ),
    "kernels/__init__.py (accept_<rule>)": (
        {name.removeprefix("accept_") for name in specdec.kernels.__all__ if name.startswith("accept_")},
        set(),
    ),
}


def missing(name, places, pages):
    """Places and pages that do not have a name."""
    lacking = [place for place, (has, exempt) in places.items() if name not in has and name not in exempt]
    for page in pages:
        text = (ROOT / page).read_text("utf-8") if (ROOT / page).exists() else ""
        if not re.search(rf"(?<!\w){re.escape(name)}(?![\w+])", text):
            lacking.append(page)
    return lacking


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_drafter_is_everywhere(variant):
    kind = TINY_DRAFTERS[variant].kind if variant in TINY_DRAFTERS else variant
    module = drafter_class(kind).__module__.rpartition(".")[2]
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "drafters").glob("*.md"))
    lacking = missing(variant, PLACES, ["docs/drafters/README.md"])
    if not (ROOT / f"docs/drafters/{module}.md").exists() and f"specdec/drafters/{module}.py)" not in pages:
        lacking.append(f"docs/drafters/{module}.md (or a page that links to specdec/drafters/{module}.py)")
    assert not lacking, f"drafter kind {variant!r} is missing in: {', '.join(lacking)}"


def test_every_network_can_be_trained():
    assert set(NETWORK_KINDS) <= set(TRAINABLE_KINDS)


@pytest.mark.parametrize("rule", RULES)
def test_every_acceptance_rule_is_everywhere(rule):
    lacking = missing(rule, RULE_PLACES, ["docs/sampling.md"])
    assert not lacking, f"acceptance rule {rule!r} is missing in: {', '.join(lacking)}"


@pytest.mark.parametrize(("task", "places"), [("drafter", PLACES), ("acceptance rule", RULE_PLACES)])
def test_the_checklists_name_every_place(task, places):
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    found = re.search(rf"^\*\*An? {task}\*\*(.*?)^(\*\*|## )", guide, re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md has no checklist for adding: {task}"
    lacking = [place for place in (one.partition(" ")[0] for one in places) if place not in found[1]]
    assert not lacking, f"CONTRIBUTING.md, adding: {task}, does not name {', '.join(lacking)}"

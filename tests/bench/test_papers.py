"""The papers' claims: acceptance rates by enumeration, cells that resume, verdicts, and the page."""

import itertools
import json
import re
import shutil

import pytest
import torch

from specdec.bench import papers
from specdec.bench.claims.arms import Arm, Bench, NotRunError, Sizes, figures
from specdec.bench.claims.page import judge, page
from specdec.bench.claims.rates import rates_at_zero, rates_of_drawn
from specdec.bench.claims.table import CLAIMS, Claim
from specdec.bundled.load import TINY_FOLDER, load_tiny
from specdec.common.provenance import read_records
from specdec.evaluation.prompts import first_turns, read_questions
from specdec.loop.decoder import Decoder
from specdec.loop.rules import Naive, Rejection
from specdec.models.target.target import Target

OURS, THEIRS = Arm("eagle"), Arm("medusa")
CLAIM = Claim("EAGLE is longer", "3 over 2", "more", OURS, THEIRS, "It is.")


def all_refused(p, q, num_candidates, *, replacement):
    """Chance that every candidate is refused, over all sequences of them, by the paper's algorithms word for word."""
    total = 0.0
    sequences = itertools.product(range(len(p)), repeat=num_candidates)
    for sequence in sequences:
        left, law, chance = p.clone(), q.clone(), 1.0
        for token in sequence:
            if law[token] == 0:
                chance = 0.0
                break
            chance *= float(law[token] * (1 - min(1.0, float(left[token] / law[token]))))
            rest = (left - law).clamp(min=0)
            left = rest / rest.sum() if rest.sum() > 0 else left
            if not replacement:
                law = law.clone()
                law[token] = 0
                law = law / law.sum() if law.sum() > 0 else law
        total += chance
    return total


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_rates_are_those_of_all_sequences(replacement, generator):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15], dtype=torch.float64)
    num_rows = 1 if replacement else 40_000  # the mean of which is off by 0.002 at most, in four of five sigmas
    rates = rates_of_drawn(p.expand(num_rows, -1), q.expand(num_rows, -1), replacement=replacement, generator=generator)
    for k in (1, 2, 3):
        expected = 1 - all_refused(p, q, k, replacement=replacement)
        assert float(rates[:, k - 1].mean()) == pytest.approx(expected, abs=1e-12 if replacement else 0.005)
    assert (rates.diff(dim=1) >= 0).all()


def test_equal_laws_accept_the_first_candidate(generator):
    p = torch.rand(3, 6, generator=generator).softmax(-1)
    for replacement in (True, False):
        rates = rates_of_drawn(p, p.clone(), replacement=replacement, generator=generator)
        assert torch.allclose(rates, torch.ones_like(rates))


def test_rates_at_zero_count_the_best_candidates():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    guesses = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 3.0]])
    assert rates_at_zero(logits, guesses)[:, :4].tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]


def test_claims_are_told_apart():
    claims = [claim for rows in CLAIMS.values() for claim in rows]
    assert len(claims) >= 15
    assert len({claim.text for claim in claims}) == len(claims)
    assert all(claim.ours != claim.theirs and claim.why and claim.paper for claim in claims)
    names = {str(arm): arm for claim in claims for arm in (claim.ours, claim.theirs)}
    assert len(names) == len({arm for claim in claims for arm in (claim.ours, claim.theirs)})  # cells are known by them


def counts(tau, num=30, wobble=0.0):
    return {place: (10 * (tau + wobble * (-1) ** place), 10.0) for place in range(num)}


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "note"),
    [
        ([counts(3.0)], [counts(2.0)], "reproduced", ""),
        ([counts(2.0)], [counts(3.0)], "not reproduced", ""),
        ([counts(3.0, wobble=2.5)], [counts(2.9)], "undecided", ""),
        ([counts(2.05)], [counts(2.0)], "undecided", "within 5 %, which takes 3 training seeds to tell; 1 ran"),
        ([counts(2.05)] * 3, [counts(2.0)] * 3, "reproduced", ""),
        ([counts(3.0, num=12)], [counts(2.0)], "undecided", "12 prompts are too few to tell"),
    ],
)
def test_verdicts(ours, theirs, verdict, note):
    outcome = judge(CLAIM, {OURS: ours, THEIRS: theirs}.__getitem__)
    assert (outcome.verdict, outcome.note) == (verdict, note)
    assert outcome.num_prompts == min(len(ours[0]), len(theirs[0]))


@pytest.mark.parametrize(("before", "verdict"), [(2.0, "reproduced"), (3.0, "undecided")])
def test_a_claim_says_nothing_without_the_one_it_presupposes(before, verdict):
    last = Arm("hydra", (1, 1)), Arm("hydra", (1,))
    measured = {last[0]: [counts(3.0)] * 3, last[1]: [counts(3.0)] * 3, OURS: [counts(3.0)], THEIRS: [counts(before)]}
    claim = Claim("No more comes", "", "equal", *last, "", presupposes=CLAIM)
    assert judge(claim, measured.__getitem__).verdict == verdict


def test_the_page_tells_what_was_run_and_what_was_not():
    def measured(arm):
        if arm == THEIRS:
            return [counts(2.0), counts(2.1)]
        if arm == OURS:
            return [counts(3.0)]
        raise NotRunError(f"{arm.drafter}: not there")

    missing = Claim("Falcon is longer", "4 over 3", "more", Arm("falcon"), OURS, "Blocks.")
    text = page({"A": [CLAIM], "B": [missing]}, measured, {"Target": "tiny"})
    assert "Of 2 claims: 1 reproduced, 0 not reproduced, 0 undecided, 1 not run." in text
    assert "3.00 and 2.05: 1.463" in text
    assert "**not run** (falcon: not there)" in text
    assert "| 2.000 2.100" in text
    assert "Target: tiny" in text


@pytest.fixture(scope="module")
def bench():
    model, tokenizer = load_tiny()
    prompts = first_turns(read_questions(TINY_FOLDER / "prompts.json")[:3], tokenizer)
    sizes = Sizes(num_new_tokens=16, num_sampled_tokens=8, num_sampled_prompts=2, num_contexts=2, batch_size=2)
    return Bench(Target(model), prompts, [], TINY_FOLDER, sizes, [])


def test_arms_that_sample_are_decoded_and_greedy_ones_replayed(bench):
    drawn = bench.measure(Arm("draft_model", (2, 2), Rejection(), 1.0), "draft_model")
    assert list(drawn) == [0, 1]
    assert all(tokens == 7 for tokens, _ in drawn.values())  # the prompt's own token is no step's
    greedy = bench.measure(Arm("medusa", (2, 1)), "medusa")
    drafter = bench.drafter(Arm("medusa", (2, 1)), "medusa")
    real = Decoder(bench.target, drafter).decode(list(bench.prompts), 16).stats.num_emitted
    assert list(greedy.values()) == [(sum(row), len(row)) for row in real]
    short = bench.measure(Arm("medusa", (2, 1), is_short=True), "medusa")
    assert all(tokens == 7 for tokens, _ in short.values())


def test_costs_count_nodes_of_trees_and_of_their_paths():
    steps = {0: (12.0, 4.0)}  # tokens, steps
    arm = Arm("draft_model", (2, 2), Rejection(), 1.0, figure="nodes per token")
    assert figures(arm, steps, (4, 2, 1, 1)) == {0: (4 * 7, 12.0)}
    paths = Arm("draft_model", (2, 2), Rejection(), 1.0, figure="path nodes per token")
    assert figures(paths, steps, (4, 2, 1, 1)) == {0: (4 * 4 * 3, 12.0)}
    assert paths.steps == arm.steps == Arm("draft_model", (2, 2), Rejection(), 1.0)


def test_rates_grow_with_the_candidates(bench):
    rates = {
        k: bench.measure(
            Arm("draft_model", None, Rejection(), 1.0, figure="acceptance rate", num_candidates=k), "draft_model"
        )
        for k in (1, 4)
    }
    assert all(places == 2 for _, places in rates[1].values())
    assert all(rates[4][place][0] > rates[1][place][0] for place in rates[1])
    with pytest.raises(NotRunError, match="rejection, or greedy at temperature 0"):
        bench.measure(Arm("draft_model", None, Naive(), 1.0, figure="acceptance rate"), "draft_model")
    with pytest.raises(NotRunError, match="computed for draft models, got medusa"):
        bench.measure(Arm("medusa", None, figure="acceptance rate"), "medusa")


def test_what_a_drafter_cannot_do_is_told(bench):
    with pytest.raises(NotRunError, match="depth of at most 3"):
        bench.measure(Arm("medusa", (1,) * 6), "medusa")
    assert bench.sources(Arm("nobody")) == []


def test_the_command_resumes_and_sees_drafters_change(tmp_path, capsys):
    folder, output, written = tmp_path / "drafters", tmp_path / "papers.jsonl", tmp_path / "page.md"
    for name in ("medusa", "amphista", "hydra++"):
        shutil.copytree(TINY_FOLDER / name, folder / name)
    sizes = "--tree 2 1 1 --num-new-tokens 12 --num-sampled-tokens 4 --num-sampled-prompts 2 --num-prompts 3"
    options = ["--model", "tiny", "--drafters", str(folder), "--prompts", str(TINY_FOLDER / "prompts.json")]
    options += ["--only", "amphista", "--output", str(output), *sizes.split()]
    assert papers.main([*options, "--update", str(written)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"undecided +Amphista is accepted longer than Medusa: \d", shown)
    assert "not run        The sampled token lengthens acceptance: short-amphista: not there" in shown
    records = [json.loads(line) for line in output.read_text().splitlines()]
    ended = [record for record in records if "cell" in record]
    assert {record["drafter"] for record in ended} == {"medusa", "amphista", "hydra++"}
    assert all(record["provenance"]["utc"] and record["setup"]["model"] == "tiny" for record in ended)
    assert "the first turns of tiny/prompts.json, 3 of them" in written.read_text()
    assert re.search(r"Trainings: .*800 steps of 8 texts: amphista, hydra\+\+.*900 steps", written.read_text())
    assert str(tmp_path) not in output.read_text() + written.read_text()

    assert papers.main(options) == 0
    assert len(output.read_text().splitlines()) == len(records)
    shutil.copytree(TINY_FOLDER / "hydra", folder / "medusa", dirs_exist_ok=True)
    assert papers.main(options) == 0
    again = [json.loads(line) for line in output.read_text().splitlines()][len(records) :]
    assert {record["drafter"] for record in again if "cell" in record} == {"medusa"}
    capsys.readouterr()
    assert papers.main([*options, "--tree", "2", "1", "1", "1"]) == 0
    assert "hydra++: tree: expected a depth of 1 to 3, one level per head, got 4" in capsys.readouterr().out


def test_the_page_is_that_of_the_records():
    records = read_records(papers.PAGE.parents[1] / "bench/results/cpu/papers.jsonl")
    assert papers.page_of(records) == papers.PAGE.read_text(encoding="utf-8")
    told = [line for line in papers.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert sum("**" in line and "not run" not in line for line in told) >= 15


def test_bad_options_are_named(tmp_path, capsys):
    options = ["--prompts", str(TINY_FOLDER / "prompts.json"), "--output", str(tmp_path / "x")]
    for extra, message in (
        (["--model", "other"], "--drafters: expected a folder of drafters, got none"),
        (["--model", "tiny", "--drafters", "nowhere"], "--drafters: expected a folder, got nowhere"),
        (["--model", "tiny", "--num-new-tokens", "4"], "no more sampled tokens than new ones"),
    ):
        with pytest.raises(SystemExit):
            papers.main([*options, *extra])
        assert message in capsys.readouterr().err

"""The Python examples of the documents run, on the bundled model."""

import re
from pathlib import Path

import pytest

from specdec.bench.chat_table import chat_table
from specdec.bench.drafter_table import drafter_table
from specdec.bench.lookups import lookup_table
from specdec.bench.tree_budgets import BUDGETS, DRAFTERS, tree_table
from specdec.bench.unions import union_table
from specdec.bundled.load import TINY_FOLDER
from specdec.common.provenance import read_records
from specdec.evaluation.records import read_results
from specdec.evaluation.report.document import markdown
from specdec.evaluation.report.found import find
from specdec.evaluation.report.sections import document_of
from specdec.evaluation.report.write import as_bytes

ROOT = Path(__file__).resolve().parent.parent
# What the README names, and what stands in for it on a machine without a GPU or a network.
STAND_INS = {
    "meta-llama/Llama-3.1-8B-Instruct": str(TINY_FOLDER / "target"),
    "torch.bfloat16": "torch.float32",
    '"cuda"': '"cpu"',
    "max_new_tokens=256": "max_new_tokens=16",
    '"smollm2': '"tiny',
}


def examples(page):
    """The Python blocks of a page, at their own line numbers, so that a traceback points into the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield "\n" * (text[: block.start()].count("\n") + 1) + block.group(1)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/sampling.md", "docs/prompts.md", "docs/engine.md", "docs/batch.md"]
)
def test_the_examples_run_in_order(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")  # what transformers needs for device_map
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    count = 0
    for source in examples(page):
        for name, stand_in in STAND_INS.items() if page in ("README.md", "docs/engine.md") else ():
            source = source.replace(name, stand_in)
        exec(compile(source, str(ROOT / page), "exec"), names)
        count += 1
    assert count == (ROOT / page).read_text(encoding="utf-8").count("```python\n") > 0
    assert capsys.readouterr().out


def test_the_tables_of_the_bundled_drafters_are_those_of_their_records():
    page = (ROOT / "docs/drafters/README.md").read_text(encoding="utf-8")
    assert drafter_table(ROOT / "bench/results/cpu/decode.jsonl") in page
    assert chat_table(ROOT / "bench/results/cpu/smollm2.jsonl") in page


def test_trees_accept_more_than_chains_at_equal_passes():
    """The table of docs/drafters/dflash.md is that of its record, and says so."""
    file = ROOT / "bench/results/cpu/tree_budgets.jsonl"
    assert tree_table(file) in (ROOT / "docs/drafters/dflash.md").read_text(encoding="utf-8")
    tau = {(one["drafter"], one["budget"], one["shape"]): one["tau"] for one in read_records(file)}
    for name in DRAFTERS:
        ratios = {budget: tau[name, budget, "tree"] / tau[name, budget, "chain"] for budget in BUDGETS}
        assert min(ratios.values()) >= 1, ratios
        assert ratios[32] >= 1.15, ratios


def test_suffix_accepts_more_than_prompt_lookup():
    """The table of docs/drafters/suffix.md is that of its record, and says so."""
    file = ROOT / "bench/results/cpu/lookups.jsonl"
    assert lookup_table(file) in (ROOT / "docs/drafters/suffix.md").read_text(encoding="utf-8")
    tau = {(one["category"], one["arm"]): one["tau"] for one in read_records(file)}
    ratios = {category: tau[category, "suffix"] / tau[category, "prompt_lookup"] for category, _ in tau}
    assert min(ratios[category] for category in ("editing", "quotation", "code")) > 1
    assert min(ratios.values()) >= 0.95, ratios


@pytest.mark.parametrize("model", ["smollm2", "tiny"])
def test_what_unions_are_worth_is_what_the_records_say(model):
    page = (ROOT / "docs/drafters/union.md").read_text(encoding="utf-8")
    assert union_table(ROOT / "bench/results/cpu/unions" / model) in page


EVALUATIONS = sorted(path.parent for path in (ROOT / "bench/results/cpu/evaluation").glob("*/records.jsonl"))


@pytest.mark.parametrize("folder", EVALUATIONS, ids=lambda folder: folder.name)
def test_the_results_are_those_of_their_records(folder):
    """The pages are what `specdec report FOLDER` writes as summary.md."""
    written = as_bytes(markdown(document_of(find(read_results(folder)))))
    assert (ROOT / "docs/results" / f"{folder.name}.md").read_bytes() == written


def test_the_table_of_the_readme_is_that_of_its_record():
    readme, results = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results/smollm2.md"))
    table = results[results.index("| arm | tok/s") : results.index("### Beside transformers")].strip()
    assert table.count("\n") > 5
    assert table in readme

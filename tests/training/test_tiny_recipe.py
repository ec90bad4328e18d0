"""The bundled model's recipe in miniature: its parts are trained once each, and are usable."""

import json
import re
from pathlib import Path

import pytest
import torch

import specdec
from lib.families import build_model
from specdec.models.target.target import Target
from specdec.training.bundled_drafters import BundledDrafter
from specdec.training.corpus import END_OF_TEXT, Corpus, TokenWindows, read_standard_library, train_tokenizer
from specdec.training.kinds import objective_class, training_settings
from specdec.training.tiny import train_tiny
from specdec.training.tiny_drafters import TINY_DRAFTERS, TinyTexts
from specdec.training.tiny_target import TinyTargetRecipe

pytest.importorskip("accelerate")

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200))
CORPUS = Corpus(train=[TEXT, TEXT[1000:]], held_out=[TEXT[:3000]])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
SCHEDULE = {"batch_size": 4, "num_steps": 30, "warmup_steps": 2, "learning_rate": 1e-2}
TARGET = TinyTargetRecipe(vocab_size=300, context=128, window=32, **SIZES, **SCHEDULE)
TEXTS = TinyTexts(num_texts=24, num_held_out=4, prompt_tokens=4, window=16, temperatures=(0.0, 0.6), batch_size=8)
SHAPE = ((0,), (1,), (0, 0))
DRAFTERS = {
    "draft_model": BundledDrafter("draft_model", 4, 3e-3, SHAPE, {"hidden_size": 16, "num_attention_heads": 1}, 4),
    "two_heads": BundledDrafter("medusa", 4, 2e-3, SHAPE, {"num_heads": 2}, 4),
    "head": BundledDrafter("eagle", 4, 2e-3, SHAPE, {}, 4),
    "parallel": BundledDrafter("parallelspec", 4, 1e-9, SHAPE, {"num_masks": 1}, 4, eagle="head"),
}


def test_the_departures_from_the_papers_are_those_of_the_table():
    """docs/training.md: steps, epochs and rates of the bundled drafters beside their kind's recipe."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w+]+)` \| (\d+ \([\d.]+\) \| [^|]+ \| [^|]+) \|", page, re.MULTILINE))
    target = Target(build_model("llama"))
    taps = {"eagle3": (0, 1, 1), "peagle": (0, 1, 1), "dflash": (0, 1), "dspark": (0, 1)}
    for name, made in TINY_DRAFTERS.items():
        settings = {key: value for key, value in made.settings.items() if key == "variant"}
        settings |= {"version": 3} if name == "eagle3" else {}
        settings |= {"tap_layers": taps[name]} if name in taps else {}
        recipe = objective_class(made.kind).new(target, **settings).recipe
        epochs = made.steps * made.batch_size / TinyTexts().num_texts
        steps = f"{made.steps} ({epochs:.1f}) | {made.learning_rate:.0e}"
        assert rows[name] == f"{steps} | {recipe.epochs}, {recipe.learning_rate:.0e}".replace("e-0", "e-")
    assert rows.keys() == TINY_DRAFTERS.keys()


def train_miniature(tmp_path, **kwargs):
    arguments = {"target_recipe": TARGET, "texts_recipe": TEXTS, "drafters": DRAFTERS, "corpus": CORPUS}
    return train_tiny(tmp_path / "out", tmp_path / "work", **{**arguments, **kwargs})


def test_every_part_is_trained_saved_and_usable(tmp_path):
    from transformers import AutoTokenizer, LlamaForCausalLM

    with pytest.raises(FileNotFoundError, match="output: expected the target in"):
        train_miniature(tmp_path, only=["two_heads"])
    with pytest.raises(ValueError, match="only: expected some of target, draft_model, .*, parallel, got medusa"):
        train_miniature(tmp_path, only=["medusa"])
    reports = train_miniature(tmp_path, only=["target"])
    assert set(reports) == {"target"}
    assert reports["target"]["held_out_loss"] < 4.5  # log(300) = 5.7 knows nothing
    record = json.loads((tmp_path / "out/target/training.json").read_text())
    assert record["recipe"]["vocab_size"] == 300
    target = (tmp_path / "out/target/model.safetensors").read_bytes()
    assert set(train_miniature(tmp_path, only=["two_heads"])) == {"two_heads"}
    texts = torch.load(tmp_path / "work/texts.pt", weights_only=True)
    assert texts.shape == (24, 16)
    written = (tmp_path / "work/texts.pt").stat().st_mtime_ns

    with pytest.raises(FileNotFoundError, match="output: expected head in .*, with which parallel begins, got none"):
        train_miniature(tmp_path, only=["parallel"])
    rest = {"draft_model", "head", "parallel"}
    assert set(train_miniature(tmp_path)) == rest, "parts that exist are not trained again"
    assert train_miniature(tmp_path) == {}
    assert (tmp_path / "work/texts.pt").stat().st_mtime_ns == written
    assert (tmp_path / "out/target/model.safetensors").read_bytes() == target
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out/target", dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "out/target")("def f3(x):", return_tensors="pt").input_ids
    plain = specdec.generate(model, None, ids, max_new_tokens=12)
    drafters = {name: specdec.load_drafter(tmp_path / "out" / name, model) for name in ("head", "parallel")}
    assert torch.equal(drafters["parallel"].network.fc.weight, drafters["head"].network.fc.weight), "a rate of nothing"
    for name in DRAFTERS:
        assert torch.equal(specdec.generate(model, tmp_path / "out" / name, ids, max_new_tokens=12), plain)
        assert specdec.load_drafter(tmp_path / "out" / name, model).shape == specdec.TreeShape.from_paths(SHAPE)


def test_the_bundled_drafters_settings_are_those_of_their_kinds():
    target = Target(build_model("llama"))
    for name, recipe in TINY_DRAFTERS.items():
        settings = {**training_settings(recipe.kind), **recipe.settings}
        if "tap_layers" in settings:
            settings |= {"tap_layers": (0, 1, 2)}
        if "draft_vocab_size" in settings:
            settings["draft_tokens"] = range(settings.pop("draft_vocab_size") // 32)
        if "start_layers" in settings:
            settings["start_layers"] = (1, 2)
        if "head_rank" in settings:
            settings["head_rank"] = 8
        objective = objective_class(recipe.kind).new(target, **settings)
        shape = None if recipe.paths is None else specdec.TreeShape.from_paths(recipe.paths)
        assert objective.drafter(shape).kind == recipe.kind, name
        assert shape is None or 10 <= shape.num_nodes <= 16


def test_the_corpus_is_the_standard_library_split_by_file(tmp_path):
    for index in range(80):
        (tmp_path / f"m{index:02}.py").write_text(f"x = {index}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("left out")
    (tmp_path / "empty.py").write_text(" \n")
    corpus = read_standard_library(tmp_path)
    assert corpus.held_out == ["x = 39\n", "x = 79\n"]
    assert len(corpus.train) == 78
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="root: expected a folder with .py files"):
        read_standard_library(tmp_path / "empty")


def test_windows_join_documents_with_the_end_of_text_token():
    tokenizer = train_tokenizer([TEXT], 300, 128)
    assert tokenizer.eos_token == END_OF_TEXT
    windows = TokenWindows(["ab", "c"], tokenizer, 5)
    end, first, second = tokenizer.eos_token_id, tokenizer("ab").input_ids, tokenizer("c").input_ids
    assert windows[0]["input_ids"].tolist() == [end, *first, end, *second]
    with pytest.raises(ValueError, match="texts: expected at least 50 tokens, got 5"):
        TokenWindows(["ab", "c"], tokenizer, 50)

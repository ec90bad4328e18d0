"""The recipe of the bundled model in miniature: it learns, resumes, and never leaves a half-written folder."""

import json

import pytest
import torch

import specdec
from specdec.training.corpus import END_OF_TEXT, Corpus, TokenWindows, read_standard_library, train_tokenizer
from specdec.training.tiny import train_tiny
from specdec.training.tiny_drafters import DrafterRecipe
from specdec.training.tiny_target import TinyTargetRecipe

pytest.importorskip("accelerate")

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200))
CORPUS = Corpus(train=[TEXT, TEXT[1000:]], held_out=[TEXT[:3000]])
TARGET = TinyTargetRecipe(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    context=128, window=32, batch_size=4, num_steps=30, warmup_steps=2, learning_rate=1e-2,
)  # fmt: skip
DRAFTERS = DrafterRecipe(
    num_texts=48, prompt_tokens=4, window=16, medusa_heads=2, medusa_steps=6,
    draft_hidden_size=16, draft_layers=1, draft_steps=6, batch_size=4,
)  # fmt: skip


def train(tmp_path):
    return train_tiny(tmp_path / "out", tmp_path / "work", target_recipe=TARGET, drafter_recipe=DRAFTERS, corpus=CORPUS)


def test_every_part_is_trained_saved_and_usable(tmp_path):
    reports = train(tmp_path)
    assert set(reports) == {"target", "medusa", "draft_model"}
    assert reports["target"]["held_out_loss"] < 4.5  # log(300) = 5.7 knows nothing
    record = json.loads((tmp_path / "out/target/training.json").read_text())
    assert record["recipe"]["vocab_size"] == 300
    model, tokenizer = load(tmp_path / "out/target")
    ids = tokenizer("def f3(x):", return_tensors="pt").input_ids
    plain = specdec.generate(model, None, ids, max_new_tokens=12)
    for kind in ("medusa", "draft_model"):
        drafted = specdec.generate(model, tmp_path / "out" / kind, ids, max_new_tokens=12, tree=(2, 2))
        assert torch.equal(drafted, plain)
    assert train(tmp_path) == {}, "parts that exist are not trained again"


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    import specdec.training.tiny as tiny

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "train_tiny_medusa", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    weights = (tmp_path / "out/target/model.safetensors").read_bytes()
    texts = (tmp_path / "work/texts.pt").stat().st_mtime_ns
    assert not (tmp_path / "out/medusa").exists()
    assert set(train(tmp_path)) == {"medusa", "draft_model"}
    assert (tmp_path / "out/target/model.safetensors").read_bytes() == weights
    assert (tmp_path / "work/texts.pt").stat().st_mtime_ns == texts


def load(folder):
    from transformers import AutoTokenizer, LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


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
    assert windows[0]["input_ids"].tolist() == [
        tokenizer.eos_token_id, *tokenizer("ab").input_ids, tokenizer.eos_token_id, *tokenizer("c").input_ids,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="texts: expected at least 50 tokens, got 5"):
        TokenWindows(["ab", "c"], tokenizer, 50)

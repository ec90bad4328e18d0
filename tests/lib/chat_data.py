"""Made-up samples of every form of data, and small tokenizers of both makes, for the tests of what reads texts."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec.training.corpus import train_tokenizer
from specdec.training.data.chat_templates import chat_template_text
from specdec.training.data.reading import read_texts

SAMPLES = Path(__file__).parent.parent / "training" / "data" / "samples"
TEXT = "".join(f"Question {i} is who answers it, and the answer is {i + 1}.\n" for i in range(99))
MARKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
"""A template that says by itself what the assistant writes."""
CALLING = (
    "{% for t in tools or [] %}can {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that shows functions and their calls."""


@cache
def byte_tokenizer():
    """Bytes and pairs of them, spaces included, as in most models."""
    return train_tokenizer([TEXT], 320, 512)


@cache
def word_tokenizer():
    """Pieces of words with their spaces turned into letters, and bytes for all else, as in LLaMA 2 and Vicuna."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def template_text(name):
    """A template by name: one that ships, or one of the samples."""
    file = SAMPLES / f"{name}.jinja"
    return file.read_text() if file.exists() else chat_template_text(name)


def read(name, template="chatml", tokenizer=None, **settings):
    """What is made of a sample, or of a path."""
    tokenizer = tokenizer or byte_tokenizer()
    text = template if "{" in template else template_text(template)
    limits = {"max_length": 500, "vocab_size": len(tokenizer), **settings}
    return read_texts(SAMPLES / name, tokenizer, chat_template=text, **limits)


def learnt(sample, tokenizer=None):
    """What is learnt of a text, a string for each part of it."""
    parts, start = [], None
    for place, marked in enumerate([*sample.loss_mask.tolist(), False]):
        if marked and start is None:
            start = place
        elif not marked and start is not None:
            parts.append((tokenizer or byte_tokenizer()).decode(sample.tokens[start:place]))
            start = None
    return parts

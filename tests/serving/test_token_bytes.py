"""The bytes that log-probabilities tell of tokens make the text, in both kinds of vocabularies."""

import pytest

from lib.chat_data import byte_tokenizer, word_tokenizer
from specdec.common.text_pieces import token_bytes


@pytest.mark.parametrize("text", ["Who answers it?", "naïve café", "a 🙂 and 漢字\n\tback", "é"])
@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), word_tokenizer()], ids=["bytes", "words"])
def test_bytes_of_all_tokens_make_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    parts = [token_bytes(tokenizer, token) for token in ids]
    assert b"".join(parts).removeprefix(b" ") == text.encode()
    if "🙂" in text:
        assert any(part.decode(errors="replace") != part.decode(errors="ignore") for part in parts), "parts of one"

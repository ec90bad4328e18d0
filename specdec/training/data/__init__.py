"""Texts to learn from, as people have them: files of every form, conversations through chat templates, masks.

From a file to what a drafter learns: `files.py` (rows with their places), `rows.py` (the form of a row),
`conversations.py` (its turns), `chat_templates.py` (their text), `answers.py` (where in it the answers lie),
`samples.py` (token ids with a mask), `reading.py` (all of it), `left_out.py` (what became of it), `token_cache.py`
(once for all processes). `templates/` holds the chat templates that ship.
"""

from specdec.training.data.files import data_hash
from specdec.training.data.reading import Texts, read_samples
from specdec.training.data.samples import MIN_TOKENS, Collate, Sample, Samples, collate, split_held_out, token_counts

__all__ = ["MIN_TOKENS", "Collate", "Sample", "Samples", "Texts", "collate", "data_hash", "read_samples"]
__all__ += ["split_held_out", "token_counts"]

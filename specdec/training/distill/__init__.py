"""The target itself writes the texts that drafters learn from: a drafter has to guess the target, not the data.

`distilling.py` is a job (`specdec.jobs`) whose lines have token ids, `self_prompts.py` lets the target make up what it
answers, `continuing.py` continues a closed batch of prompts.
"""

from specdec.training.distill.continuing import continue_prompts
from specdec.training.distill.distilling import distill
from specdec.training.distill.self_prompts import SelfPrompts

__all__ = ["SelfPrompts", "continue_prompts", "distill"]

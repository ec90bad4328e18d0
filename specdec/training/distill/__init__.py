"""The target itself writes the texts that drafters learn from: a drafter has to guess the target, not the data.

`prompts.py` reads what is to be answered, `self_prompts.py` lets the target make that up as well, `plan.py` says which
prompts are answered together, `writing.py` answers such a batch turn by turn, `parts.py` keeps what several processes
write until it is one file, and `distilling.py` is the whole.
"""

from specdec.training.distill.distilling import distill
from specdec.training.distill.self_prompts import SelfPrompts
from specdec.training.distill.writing import continue_prompts

__all__ = ["SelfPrompts", "continue_prompts", "distill"]

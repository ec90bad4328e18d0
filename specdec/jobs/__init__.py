"""Files of prompts to files of what a target writes: by one process, under torchrun, or through Ray.

`prompts.py` reads what is to be answered, `conversations.py` is a text while it is written, turn by turn, `running.py`
lets an engine write many of them side by side, `plan.py` says what decides a text, `parts.py` keeps what several
processes write until it is one file, `writing.py` is the whole of it; `batch.py` is the job of `specdec batch`, and
`specdec.training.distill` another one. `workers.py` lets Ray's actors write, `cluster.py` reaches Ray.
"""

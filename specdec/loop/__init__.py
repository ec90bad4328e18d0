"""The decoding loop: draft, score, verify, commit; what changes from step to step, and how a step is captured."""

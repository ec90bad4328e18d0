"""How to read the figures, in a few plain sentences; the words are those of docs/glossary.md."""

__all__ = ["TERMS"]

TERMS = [
    (
        "speedup",
        "new tokens per second of the whole call, prompt included, divided by those of plain decoding on the "
        "same prompts. Every arm decodes a prompt before the next prompt's turn, so that a machine that slows "
        "down slows all arms alike.",
    ),
    (
        "tau",
        "the acceptance length: tokens that one step, one pass of the target, adds to the text. Plain "
        "decoding has 1. It is the ceiling of the speedup where drafting and larger passes cost nothing.",
    ),
    (
        "efficiency",
        "speedup divided by tau: how much of what is accepted becomes speed.",
    ),
    (
        "interval",
        "in brackets, where 95 % of the results fall if the prompts are drawn anew from those that were "
        "measured (a paired bootstrap: the same prompts for both sides of a ratio). It speaks of other "
        "prompts of this kind, not of other models or machines. An interval that includes 1.00 leaves open "
        "which arm is faster.",
    ),
    (
        "slower than plain",
        "share of the prompts whose answer took longer than with plain decoding.",
    ),
    (
        "group",
        "the prompts that one call decodes together; of batches of one, a question with all its turns. Only "
        "groups that every arm has finished count, so that all arms are compared on the same prompts.",
    ),
    (
        "same texts",
        "greedy answers that are plain decoding's, token for token. In float32 all have to be. In half "
        "precision passes of different shapes round differently, and a near-tie may fall the other way: the "
        "margin tells such a tie from a bug.",
    ),
    (
        "draft tree",
        "what a drafter proposes in one step: each node is a token that could follow its parent. The target "
        "scores all nodes in one pass, keeps the path it agrees with, and adds a token of its own.",
    ),
]

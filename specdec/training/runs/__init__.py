"""One training run: the order of its texts, the loop around them, what it shows, and what it keeps of itself.

`batches.py` (who runs which texts, in how many passes), `trainer.py` (the loop), `progress.py` (the terminal),
`probe.py` (tau while it trains), `record.py` (what makes a run the same run), `curves.py` (its picture).
"""

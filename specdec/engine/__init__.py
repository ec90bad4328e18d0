"""Many requests on one model: rows that are refilled as they end. `engine.py` is what users call."""

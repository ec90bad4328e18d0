"""What targets and draft networks are both made of: caches, what a pass may see, attention, LM heads."""

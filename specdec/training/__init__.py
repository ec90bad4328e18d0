"""Training: the bundled tiny model and, per drafter, the recipe of its paper."""

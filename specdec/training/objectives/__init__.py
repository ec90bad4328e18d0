"""What each kind of drafter learns: one module per kind, each with its paper's loss and recipe."""

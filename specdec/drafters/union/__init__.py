"""Several drafters as one: their proposals merged into one tree, sized by what each size is worth on this machine."""

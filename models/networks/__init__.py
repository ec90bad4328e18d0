"""Draft networks, one file each: what is computed, without trees, steps or files."""

"""Readers of the files that others published, one per system; no other room knows their names for things."""

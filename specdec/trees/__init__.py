"""Draft trees as topology, on the host: shapes, their text forms, published trees, limits of trees that grow."""

from specdec.trees.presets import preset_names

__all__ = ["preset_names"]

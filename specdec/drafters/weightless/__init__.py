"""Drafters that are their settings alone: what they propose comes from the text, not from trained weights."""

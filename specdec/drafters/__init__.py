"""Drafters: each proposes one draft tree per row and step."""

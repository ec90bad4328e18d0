"""The small model that ships with the package, its drafters, and what loads them."""

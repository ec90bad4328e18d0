"""Layer 1: target models, KV caches, draft networks, and the files that others published them in; all in rooms."""

"""Layer 1: target models, KV caches and draft networks."""

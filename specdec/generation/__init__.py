"""`specdec.generate` in transformers' terms: settings, checks, what runs on the host, and the result."""

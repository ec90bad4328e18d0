"""The target: a stock transformers model, hooked while decoding runs."""

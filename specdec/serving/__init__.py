"""An OpenAI-compatible endpoint on an `Engine`."""

"""One pytest-benchmark file per kernel."""

"""Layer 3: benchmarks of kernels and of decoding, with provenance and percent of the physical limit."""

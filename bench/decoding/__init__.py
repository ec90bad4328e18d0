"""Parts of the decoding benchmark: arms, cells, synthetic acceptance, random models, bytes that must move."""

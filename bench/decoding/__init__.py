"""Parts of the decoding benchmark: a cell with all its arms, and what is made up where nothing trained exists."""

"""What decoding gives: the check against plain decoding, drafters side by side, recorded targets, intervals."""

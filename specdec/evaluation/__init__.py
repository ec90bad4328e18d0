"""What decoding gives: questions, the check against plain decoding, drafters side by side, recordings, intervals."""

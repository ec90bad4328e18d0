"""What decoding gives: the check against plain decoding, and drafters side by side."""

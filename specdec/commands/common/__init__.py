"""What commands share: options, what becomes of them, and text on a terminal."""

"""What every room above may use: files that are never half written, random numbers, files from an address."""

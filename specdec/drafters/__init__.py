"""The drafters, one file per kind, the table of kinds, and the way from a name or a folder to a drafter."""

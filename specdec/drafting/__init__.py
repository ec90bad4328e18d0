"""The seam between loop and drafters: what a drafter is, what it hands over, and how it is saved."""

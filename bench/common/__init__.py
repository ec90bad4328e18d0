"""What all measurements share: shapes, costs, timing, the machine, where a number comes from."""

"""What all measurements share: shapes, costs, timing, the machine, tables and pictures, where a number comes from."""

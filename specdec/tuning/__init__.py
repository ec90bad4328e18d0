"""How large a tree is worth it: measured costs, and the choice that follows from them."""

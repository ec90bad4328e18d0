"""Which tree is worth it: cut or grown by measured acceptance, its size chosen by measured costs."""

"""PTX text to syntax tree, and a kernel with its calls inlined."""

"""The PTX instruction set: each function turns an instruction into one on all threads."""

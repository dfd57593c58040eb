"""The results folder: its files, HDF5 arrays, provenance, tables and how to read them back."""

"""Results folder: files, HDF5 arrays, provenance, summary tables and their reader."""

"""Sweep execution: resume loop; points in this process, in a subprocess or under mpirun."""

"""Running a sweep: resume loop, points in this process, in a subprocess or under mpirun."""

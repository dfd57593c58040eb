"""State of the thread blocks that run together: registers, memory, barriers, copies in flight."""

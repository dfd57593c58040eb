"""Files and small helpers that every room of nbflow may use."""

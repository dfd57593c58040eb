"""Files and small helpers below all other packages of nbflow."""

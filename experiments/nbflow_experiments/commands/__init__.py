"""The commands of the experiments: each has `add_arguments(parser)` and `run(args) -> int`."""

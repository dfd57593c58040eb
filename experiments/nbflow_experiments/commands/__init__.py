"""Commands of the experiments: each module has `add_arguments(parser)` and `run(args) -> int`."""

"""Arrays of other libraries as arguments and results of every public op."""

"""What quantization does to a model: columns that matter, errors of weights and of layers."""

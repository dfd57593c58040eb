"""Quantization of a model's weights: policy, calibrated quantizers, transforms."""

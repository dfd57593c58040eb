"""Comparison of a model specification with another program's computation of the same model.

`shrink` makes a small configuration, `transformers_model` a random checkpoint of it with recorded
values, `compare` runs nbflow on the checkpoint and finds the first value that differs.
"""

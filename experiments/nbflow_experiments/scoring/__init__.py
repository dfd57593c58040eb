"""Scoring text with a model, alone or beside a reference: perplexity, divergence, choices.

================  =================================================================================
`windows`         a text cut into windows, and which tokens of each are scored
`tokens`          what is learned from the logits of every scored token
`comparison`      the statistics of those numbers, with llama-perplexity's names
`stored`          a reference's logits in a chunked HDF5 file
`text`            models over windows: one pass, the reference streamed beside or read from a file
`greedy`          where two models' greedy texts part
`choices`         multiple-choice questions
`harness`         an adapter for lm-evaluation-harness
================  =================================================================================
"""

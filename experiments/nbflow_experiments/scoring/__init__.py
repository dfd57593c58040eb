"""Scoring text with a model, alone or against a reference: perplexity, divergence, choices.

====================  =============================================================================
`windows`             text windows and the range of scored tokens in each
`token_scores`        statistics of the logits of every scored token
`estimates`           means with standard errors and bootstrap intervals
`statistics_table`    the statistics of a run, with llama-perplexity's names
`logits_file`         a reference's logits in a chunked HDF5 file
`score_text`          one pass of a model over windows; the reference is a model or a file
`greedy_divergence`   first position at which two models' greedy texts differ
`multiple_choice`     multiple-choice questions
`lm_eval`             an adapter for lm-evaluation-harness
====================  =============================================================================
"""

"""Recorded sweeps over models, weight formats, partitions and batch sizes.

A sweep is a TOML file (`nbflow_experiments.config.sweep_file`); the runner measures each of its
points and writes a results folder (`nbflow_experiments.store.results_folder`) that
`nbflow_experiments.report` turns into figures and one HTML page.

The commands are ``nbflow sweep FILE`` and ``nbflow report RESULTS``.
"""

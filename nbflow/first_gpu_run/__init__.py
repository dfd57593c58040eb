"""The first run on a GPU: facts, probes, benchmarks, models, tests, in a quarter of an hour.

    python -m nbflow.first_gpu_run --out DIR --budget 600

Each section runs in a process of its own with a time limit: a hang or a crash costs one section.
Every result is a line of JSON in DIR as soon as it is there, and a run that was cut off goes on
where it stopped.  Nothing is fetched; a missing program or package is recorded.
"""

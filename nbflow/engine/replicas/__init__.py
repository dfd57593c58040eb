"""Data parallelism: several replicas of a model behind one engine."""

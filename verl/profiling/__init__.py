"""Profiles of chosen steps, in every process that does the work: `open_profiler` gives one process its profiler."""

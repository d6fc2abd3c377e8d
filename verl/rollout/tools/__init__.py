"""Tools that a model calls: how calls are written, what tools are, how they are found and run."""

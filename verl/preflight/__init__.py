"""Before the run: `--check`, `verl doctor`, `verl reward check`. Asks the components; only entry points import it."""

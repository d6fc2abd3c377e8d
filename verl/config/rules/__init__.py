"""The rules a configuration is checked against (spec: config.md §16), by subject."""

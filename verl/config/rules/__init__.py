"""The rules a configuration is checked against, by subject."""

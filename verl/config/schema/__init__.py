"""The schema: the one source of keys, types, defaults and help."""

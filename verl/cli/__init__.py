"""The `verl` command: doctor, prepare, reward check, report, export. Imports no torch at start-up."""

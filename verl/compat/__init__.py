"""Everything that exists because the public system has it: import paths, padded signatures, names of helpers.

Modules here import the core; the core imports none of them. Entry points install the import paths
(`verl.compat.paths`).
"""

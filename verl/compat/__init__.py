"""Everything that exists because the public system has it: import paths, spellings of keys, padded signatures, names of
helpers.

Modules here import the core; the core imports none of them. Importing `verl` installs the import paths
(`verl.compat.paths`); entry points pass the spellings on (`verl.compat.spellings`).
"""

"""Errors whose cause is on the user's side."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to change.

    Entry points print the message alone, without a traceback, and leave with exit code 2.
    """


REFUSED_NAMES: list[str] = []
"""Public names that user code asked for in this process and that verl does not have, with their replacements. Such code
may catch the error and return a score of 0, so its caller looks here."""

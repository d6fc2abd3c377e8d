"""Errors whose cause is on the user's side."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to change.

    Entry points print the message alone, without a traceback, and leave with exit code 2.
    """

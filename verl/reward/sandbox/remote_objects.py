"""Two programs that use each other's objects, by lines of JSON. The text of this file is the head of both.

    test    f(2) ─→ {"of": {"yours": 0}, "do": "call", "args": [2], …} ─→ f(2)  program
                 ←─ {"value": 4, "args": [2]}                          ←─

Data travels by value; what a call changes in a list, dict or set among its arguments changes for the caller too. Any
other object stays in its process, and the other process has a `Remote` of it. A `Remote` is compared and combined with
other Remotes only: the process of the object neither decides whether it equals data of the other process, nor sees that
data. This file imports nothing of verl, and runs with the Python of a service too.
"""

import builtins
import collections
import importlib
import json
import operator
import os
import sys

_BY_ITEMS = {kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque, bytes, bytearray, dict)}
_BY_PARTS = {complex: ("real", "imag"), range: ("start", "stop", "step"), slice: ("start", "stop", "step")}
_CHANGEABLE = (list, collections.deque, bytearray, dict, set)
_shared: list = []  # objects of this process that the other one has a Remote of
_keys: dict = {}  # their indices, by id
_remotes: dict = {}  # objects of the other process, by index


def connect():
    """Take the standard streams for messages: what is printed must not get among them, and none be read as input."""
    global _input, _output
    getattr(sys, "set_int_max_str_digits", int)(0)
    _input, _output = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)


class Remote:
    """An object of the other process."""

    __slots__ = ("_key",)

    def __init__(self, key):
        self._key = key

    def __getattr__(self, name):
        return ask(self, "getattr", name)


def ask(target, operation, *args, **kwargs):
    """The result of one of `OPERATIONS` on an object of the other process. An exception there is raised here, as the
    nearest built-in one."""
    sent = [_plain(value) for value in args]
    named = {name: _plain(value) for name, value in kwargs.items()}
    _send({"of": _plain(target), "do": operation, "args": sent, "kwargs": named})
    answer = serve()
    if "raised" in answer:
        name, text = answer["raised"]
        kind = getattr(builtins, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)
    for argument, before, after in zip(args, sent, answer["args"], strict=True):
        if isinstance(argument, _CHANGEABLE) and before != after:
            argument.clear()
            (argument.extend if hasattr(argument, "extend") else argument.update)(_value(after))
    return _value(answer["value"])


def serve():
    """Do what the other process asks for until it answers; returns the answer. Ends this process with the other one."""
    for line in iter(_input.readline, ""):
        message = json.loads(line)
        if "do" not in message:
            return message
        _send(_answer(message))
    os._exit(1)


def _answer(message):
    try:
        args = [_value(value) for value in message["args"]]
        kwargs = {name: _value(value) for name, value in message["kwargs"].items()}
        result = OPERATIONS[message["do"]](_value(message["of"]), *args, **kwargs)
        return {"value": _plain(result), "args": [_plain(value) for value in args]}
    except Exception as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"raised": [name, str(error)]}


def _send(message):
    _output.write(json.dumps(message) + "\n")
    _output.flush()


def _plain(value):
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Remote):
        return {"yours": value._key}
    if type(value).__module__ in ("builtins", "collections"):  # not a program's own kind of list
        if isinstance(value, list):
            return [_plain(item) for item in value]
        for name, kind in _BY_ITEMS.items():
            if isinstance(value, kind):
                return {name: [_plain(item) for item in (value.items() if kind is dict else value)]}
        for kind, parts in _BY_PARTS.items():
            if isinstance(value, kind):
                return {kind.__name__: [_plain(getattr(value, part)) for part in parts]}
        if isinstance(value, type(sys)):
            return {"module": value.__name__}
    elif hasattr(value, "tolist"):  # of numpy
        return {"array": value.tolist()} if getattr(value, "ndim", 0) else _plain(value.tolist())
    key = _keys.setdefault(id(value), len(_shared))
    if key == len(_shared):
        _shared.append(value)
    return {"mine": key}


def _value(plain):
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((name, content),) = plain.items()
    if name == "mine":
        return _remotes.setdefault(content, Remote(content))
    if name == "yours":
        return _shared[content]
    if name == "module":
        return importlib.import_module(content)
    if name == "array":
        return importlib.import_module("numpy").array(content)
    items = [_value(item) for item in content]
    if name in _BY_ITEMS:
        return _BY_ITEMS[name](items)
    return {kind.__name__: kind for kind in _BY_PARTS}[name](*items)


def _method(operation):
    def method(self, *args, **kwargs):
        if operation in _BINARY and not isinstance(args[0], Remote):
            return NotImplemented
        return ask(self, operation, *args, **kwargs)

    return method


OPERATIONS = {"getattr": getattr, "call": lambda function, *args, **kwargs: function(*args, **kwargs)}
"""What the other process may do with an object of this one."""
_BUILT_IN = ("iter", "next", "len", "bool", "str", "repr", "hash")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = (*_COMPARISONS, "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")
OPERATIONS.update({name: getattr(builtins, name) for name in _BUILT_IN})
OPERATIONS.update({name: getattr(operator, f"__{name}__") for name in (*_BINARY, "getitem", "setitem", "delitem")})
for _operation in set(OPERATIONS) - {"getattr"}:
    setattr(Remote, f"__{_operation}__", _method(_operation))

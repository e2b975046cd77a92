"""The user's lines of source: which they are, and how they are written."""

from __future__ import annotations

import contextlib
import os
import re

import torch

_HERE = os.path.dirname(__file__)
#: Files whose lines are not the user's.
NOT_THE_USERS = (
    "<",
    contextlib.__file__,
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(_HERE, ""),
    os.path.join(os.path.dirname(_HERE), "dispatch_rules", ""),
)


def line(file: str, number: int | str, function: str) -> str:
    return f"{os.path.basename(file)}:{number} in {function}"


def last_line(stack_trace: str) -> str:
    """The innermost line of the user's in the text of a stack."""
    for file, number, function in reversed(
        re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack_trace)
    ):
        if not file.startswith(NOT_THE_USERS):
            return line(file, number, function)
    return ""

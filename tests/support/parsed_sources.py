"""Syntax trees of the repository's files, for tests that read the code itself."""

import ast
import gc


def tree_of(source: str) -> ast.Module:
    """Parse a source file's text.

    The collector stands still meanwhile. While the parser makes its objects it may run, and what it
    finds may be an earlier test's lost socket; pytest then formats a traceback, which parses, too.
    CPython 3.11 counts the depth of both in one place and raises a SystemError (gh-106905).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()

"""Docstrings: a public function with four parameters or more says what each of them is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
MANY = 4
ROOMS = sorted(str(room.relative_to(ROOT)) for room in ROOT.glob("*/*/src/pilotlight/*"))
EXEMPT = ("testing.py",)
"""Ends of paths: helpers of tests take the facts that a test varies, by name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, Function]]:
    """Public functions, methods of public classes and their constructors, by qualified name."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions_in(node.body, f"{within}{node.name}.")
        elif isinstance(node, Function) and (
            node.name == "__init__" or not node.name.startswith("_")
        ):
            yield f"{within}{node.name}", node


def is_told(parameter: ast.arg) -> bool:
    """A command's parameter has its help in its annotation, from where ``--help`` takes it."""
    annotation = parameter.annotation
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated"


def parameters_of(node: Function) -> tuple[str, ...]:
    """Names of a function's parameters, without the object's own, and what is told elsewhere."""
    all_of_them = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return tuple(
        one.arg for one in all_of_them if one.arg not in ("self", "cls") and not is_told(one)
    )


def untold(source: str) -> list[str]:
    """Functions with many parameters, and a docstring of their own that does not have every one of
    them under ``Args``.
    """
    found: list[str] = []
    for name, node in functions_in(tree_of(source).body):
        docstring, parameters = ast.get_docstring(node) or "", parameters_of(node)
        if len(parameters) < MANY or not docstring or docstring.startswith(("As ``", "See ``")):
            continue
        told = docstring.partition("Args:")[2]
        if any(f"\n    {parameter}: " not in told for parameter in parameters):
            found.append(name)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_functions_with_many_parameters_say_what_they_are(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    names = {str(path.relative_to(ROOT)): path for path in files}
    kept = {name: path for name, path in names.items() if not name.endswith(EXEMPT)}
    missing = {name: found for name, path in kept.items() if (found := untold(path.read_text()))}
    assert missing == {}


ONE_OF_FOUR_IS_NOT_TOLD = '''
class A:
    def b(self, c, d, *, e, f=1):
        """Do.

        Args:
            c: x.
            d: x.
            e: x.
        """
'''


def test_a_parameter_that_is_not_told_is_found() -> None:
    source = ONE_OF_FOUR_IS_NOT_TOLD
    assert untold(source) == ["A.b"]
    assert untold(source.replace("e: x.", "e: x.\n            f: x.")) == []
    assert untold(source.replace("Do.", "As ``B.b``.")) == []
    assert untold(source.replace("class A", "class _A")) == []

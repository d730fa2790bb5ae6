"""Reads Python source with `ast`: what it imports, and a few habits that are not allowed.

Pure functions over text, so that `test_source_checks.py` can show each of them failing on a bad snippet.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("retrieval_index", "sorl_env", "sorl_algos")
_DYNAMIC = ("import_module", "__import__")
# A whole string such as "sorl_env.vector:SearchQAVectorEnv": an entry point, or a name for `import_module`.
_MODULE_STRING = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+(:\w+)?")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: its full name, the line, and whether only a type checker ever runs the import."""

    module: str
    line: int
    typing_only: bool = False
    deferred: bool = False  # inside a function, or named by a string

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]


# --- Which files, which modules -----------------------------------------------------------------------------


def python_files(*folders: str) -> list[Path]:
    """All Python files below these folders of the repository, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(relative_path: str) -> str:
    """``sorl_env/world/__init__.py`` -> ``sorl_env.world``."""
    return relative_path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# --- Imports ------------------------------------------------------------------------------------------------


def find_imports(source: str, relative_path: str, known: Iterable[str] = ()) -> list[Import]:
    """Every import of a file: at the top, in functions, relative, by `import_module`, by entry-point string.

    Args:
        source: text of the file.
        relative_path: where it lies; relative imports are resolved against it.
        known: names of the modules there are; ``from sorl_env import vector`` then means the module.
    """
    known = set(known)
    name = module_name(relative_path)
    package = name if relative_path.endswith("__init__.py") else name.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, typing_only: bool, deferred: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, typing_only, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(node, package)
            targets = {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
            found.extend(Import(target, node.lineno, typing_only, deferred) for target in sorted(targets))
        elif isinstance(node, ast.Call) and _called_name(node) in _DYNAMIC and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append(Import(first.value, node.lineno, typing_only, deferred=True))
                return
        elif isinstance(node, ast.Constant) and _is_module_string(node.value):
            found.append(Import(str(node.value).partition(":")[0], node.lineno, typing_only, deferred=True))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                visit(child, True, deferred)
            for child in node.orelse:
                visit(child, typing_only, deferred)
            return
        inside = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only, inside)

    visit(ast.parse(source), False, False)
    return found


def _resolve(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_module_string(value: object) -> bool:
    return isinstance(value, str) and _MODULE_STRING.fullmatch(value) is not None


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


# --- The import table ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Who may import what, besides the standard library.

    Paths are relative to the repository; one that ends in ``/`` is a folder. The longest path that covers
    a file is its rule.

    Args:
        own: path to the modules of our packages it may import, and all below them. Its own always.
        light: path to the libraries that any of its files may import.
        named: library to the files or folders that may import it besides.
        sealed: paths for which `named` opens nothing.
    """

    own: Mapping[str, tuple[str, ...]]
    light: Mapping[str, tuple[str, ...]]
    named: Mapping[str, tuple[str, ...]]
    sealed: tuple[str, ...] = ()

    def violations(self, relative_path: str, imports: Iterable[Import]) -> Iterator[str]:
        """One line for each import that the table does not allow."""
        own = _longest(self.own, relative_path)
        light = _longest(self.light, relative_path)
        sealed = any(_covers(path, relative_path) for path in self.sealed)
        home = _home(self.own, relative_path)
        for found in imports:
            where = f"{relative_path}:{found.line}: "
            library = found.library
            if library in PACKAGES:
                allowed = (home, *own)
                if not any(found.module == name or found.module.startswith(name + ".") for name in allowed):
                    yield f"{where}imports {found.module}; of our packages it may see {', '.join(allowed)}"
            elif library in ("scripts", "tests"):
                yield f"{where}imports {found.module}: the packages never see scripts or tests"
            elif library in sys.stdlib_module_names or library in light or found.typing_only:
                continue
            elif sealed or not any(_covers(path, relative_path) for path in self.named.get(library, ())):
                where_to = ", ".join(self.named.get(library, ())) or "no file"
                yield f"{where}imports {library}, which is for {where_to}"


def _covers(path: str, relative_path: str) -> bool:
    return relative_path.startswith(path) if path.endswith("/") else relative_path == path


def _longest_key(rules: Mapping[str, tuple[str, ...]], relative_path: str) -> str:
    matching = [path for path in rules if _covers(path, relative_path)]
    if not matching:
        raise ValueError(f"no rule covers {relative_path}; add its folder to the table")
    return max(matching, key=len)


def _longest(rules: Mapping[str, tuple[str, ...]], relative_path: str) -> tuple[str, ...]:
    return rules[_longest_key(rules, relative_path)]


def _home(rules: Mapping[str, tuple[str, ...]], relative_path: str) -> str:
    """The module prefix that a file may always import: the folder its rule names (for a file: itself)."""
    return module_name(_longest_key(rules, relative_path).rstrip("/"))


def find_cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Import cycles among modules, each once, as the list of modules along it."""
    cycles: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in graph.get(module, ()):
                walk(target, [*path, module])
            done.add(module)

    for module in graph:
        walk(module, [])
    return cycles


# --- Habits -------------------------------------------------------------------------------------------------

_UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_LEFTOVER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")


def bad_habits(source: str, relative_path: str) -> Iterator[str]:
    """Lines that unpickle, evaluate text, swallow every exception, or leave work for later."""
    for number, line in enumerate(source.splitlines(), start=1):
        if match := _LEFTOVER.search(line):
            yield f"{relative_path}:{number}: {match.group()}: finish it or leave it out"
    in_a_test = relative_path.startswith("tests/")  # which may show that a type survives being sent
    for found in find_imports(source, relative_path):
        if found.library in _UNSAFE_MODULES and not in_a_test:
            yield f"{relative_path}:{found.line}: imports {found.library}; use JSON or safetensors"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{relative_path}:{node.lineno}: bare except; name the exception"
        if isinstance(node, ast.Call):
            for problem in _bad_call(node):
                yield f"{relative_path}:{node.lineno}: {problem}"


def _bad_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    constants = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
    if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
        yield f"calls {name}"
    if name == "torch.load" and constants.get("weights_only") is not True:
        yield "torch.load without weights_only=True runs code from the file"
    if constants.get("allow_pickle") is True:
        yield "allow_pickle=True runs code from the file"
    if constants.get("trust_remote_code") is True:
        yield "trust_remote_code=True runs code from a download"

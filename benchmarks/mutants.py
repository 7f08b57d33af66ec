"""Whether the tests notice a missing check: each mutant lacks one check, and a named test must fail for it.

    python benchmarks/mutants.py [--only WORD ...]

Works in a copy of the repository and writes results/mutants.json. A mutant is a function and a piece of code that
occurs in it exactly once. The code is compared as Python parses it (`_` stands for any expression), so it may move or
be formatted otherwise. If the function no longer has it, an error is raised, so the list cannot become outdated.
"""

import argparse
import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from timing import RESULTS, write

ROOT = Path(__file__).parent.parent
GREEN, RED = 0, 1  # pytest's exit codes; others mean that nothing was tested


@dataclass(frozen=True)
class Mutant:
    """A check that is removed.

    Attributes:
        name: name of the missing check.
        function: the function with the check, as "module:name", or a module.
        old: an expression or a statement that occurs once in the function.
        new: its replacement.
        test: the test that must fail.
    """

    name: str
    function: str
    old: str
    new: str
    test: str

    @property
    def file(self) -> str:
        """The file of the function, relative to the repository."""
        target = inspect.unwrap(resolve_name(self.function))
        path: Any = (target if inspect.ismodule(target) else sys.modules[target.__module__]).__file__
        return str(Path(path).relative_to(ROOT))

    def applied(self) -> str:
        """The text of the file without the check.

        Raises:
            ValueError: if the function does not have the check exactly once.
        """
        tree: ast.Module = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        scope: Any = tree
        target = inspect.unwrap(resolve_name(self.function))
        for name in () if inspect.ismodule(target) else target.__qualname__.split("."):
            (scope,) = (node for node in scope.body if getattr(node, "name", None) == name)
        replacing = _Replacing(_parsed(self.old), _parsed(self.new))
        replacing.generic_visit(scope)
        if replacing.count != 1:
            raise ValueError(f"{self.name}: {self.function} has `{self.old}` {replacing.count} times, not once")
        return ast.unparse(tree)


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new, self.count = old, new, 0

    def visit(self, node: ast.AST) -> Any:
        if _alike(self.old, node):
            self.count += 1
            return self.new
        return self.generic_visit(node)


def _parsed(code: str) -> ast.AST:
    (statement,) = ast.parse(code.strip(), mode="exec").body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _alike(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_alike, pattern, node))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _alike(getattr(pattern, field), getattr(node, field)) for field in pattern._fields if field != "ctx"
        )
    return pattern == node


FILES, STORE, SERVICE = "tests/utils/test_files.py::", "tests/gallery/test_store.py::", "tests/service/"
MUTANTS = (
    Mutant(
        "fsync of a file",
        "lam.utils.files:write_atomically",
        "os.fsync(_)",
        "None",
        FILES + "test_the_file_is_synced_before_it_gets_its_name",
    ),
    Mutant(
        "fsync of its folder",
        "lam.utils.files:write_atomically",
        "sync_folder(_)",
        "None",
        FILES + "test_the_file_is_synced_before_it_gets_its_name",
    ),
    Mutant(
        "rename: a file is written in place",
        "lam.utils.files:write_atomically",
        "Path(name)",
        "path",
        FILES + "test_a_failing_writer_leaves_the_old_file",
    ),
    Mutant(
        "SHA-256 of a file",
        "lam.utils.files:verify",
        "sha256_of(_) != _",
        "False",
        FILES + "test_every_cut_and_every_flipped_bit_is_caught_and_named",
    ),
    Mutant(
        "content hash of a row",
        "lam.gallery.item:is_whole",
        "hash_of(_) == _",
        "True",
        STORE + "test_an_altered_row_is_named_and_can_be_dropped",
    ),
    Mutant(
        "ledger over all rows",
        "lam.gallery.store:ItemStore._read_whole",
        "digest != _",
        "False",
        STORE + "test_a_row_that_is_replaced_by_another_is_noticed",
    ),
    Mutant(
        "SQLite waits for the disk",
        "lam.gallery.database:connect",
        '"PRAGMA synchronous=FULL"',
        '"PRAGMA synchronous=NORMAL"',
        STORE + "test_every_connection_waits_for_the_disk_and_overwrites_what_is_deleted",
    ),
    Mutant(
        "SQLite overwrites what is deleted",
        "lam.gallery.store:ItemStore._connect",
        '"PRAGMA secure_delete=ON"',
        '"PRAGMA secure_delete=OFF"',
        STORE + "test_what_is_deleted_is_in_no_file",
    ),
    Mutant(
        "acknowledged only once written",
        "lam.service.engine:Engine.write",
        "await asyncio.shield(self.do(_, _))",
        "(self.writer.submit(operation), Change(created=True))[1]",
        SERVICE + "test_app.py::test_a_disk_that_is_full_is_507_and_searches_go_on",
    ),
    Mutant(
        "size of a body",
        "lam.service.limits:Limits._body",
        "size > limit",
        "False",
        SERVICE + "test_limits.py::test_a_body_of_the_limit_passes_and_one_more_byte_does_not",
    ),
    Mutant(
        "size of all bodies together",
        "lam.service.limits:Limits._require_memory",
        "self._held > _",
        "False",
        SERVICE + "test_limits.py::test_all_bodies_together_are_bounded_and_let_go",
    ),
    Mutant(
        "memory taken from clients that do not read",
        "lam.service.limits:Limits._hold",
        "self.make_room()",
        "None",
        SERVICE + "test_connections.py::test_clients_that_do_not_read_take_no_memory_from_others",
    ),
    Mutant(
        "size of a body of JSON",
        "lam.service.bodies:_refuse_large",
        "_ > most",
        "False",
        SERVICE + "test_bodies.py::test_json_has_a_limit_of_its_own",
    ),
    Mutant(
        "deadline of reading an answer",
        "lam.service.connections:Connection._follow",
        'self._await("reading")',
        "self._await(None)",
        SERVICE + "test_connections.py::test_an_answer_must_be_read_in_time",
    ),
    Mutant(
        "connections in all",
        "lam.service.connections:OpenConnections.add",
        "len(_) < self._most or _",
        "True",
        SERVICE + "test_connections.py::test_one_too_many_is_refused_where_all_are_at_work",
    ),
    Mutant(
        "connections of one client",
        "lam.service.connections:OpenConnections.add",
        "_ < self._of_client or _",
        "True",
        SERVICE + "test_connections.py::test_one_client_cannot_take_all",
    ),
    Mutant(
        "small chunks of a body",
        "lam.service.connections:_Requests.next_event",
        "self._chunks > _",
        "False",
        SERVICE + "test_connections.py::test_a_body_of_very_many_small_chunks_is_refused",
    ),
    Mutant(
        "deadline of a body",
        "lam.service.limits:Limits._body",
        "asyncio.timeout(_)",
        "asyncio.timeout(None)",
        SERVICE + "test_limits.py::test_a_body_that_drips_is_refused_in_time",
    ),
    Mutant(
        "API key",
        "lam.service.keys:Keys.right_of",
        "hmac.compare_digest(_, _)",
        "True",
        SERVICE + "test_limits.py::test_a_key_is_asked_for_where_there_is_one",
    ),
    Mutant(
        "host, where there is no key",
        "lam.service.limits:Limits._require_host",
        "_ not in LOCAL_HOSTS",
        "False",
        SERVICE + "test_limits.py::test_without_a_key_other_names_for_this_machine_are_refused",
    ),
    Mutant(
        "pixels of an image",
        "lam.service.embedder:_refuse_large",
        "_ > settings.max_pixels",
        "False",
        SERVICE + "test_images.py::test_too_many_pixels_are_refused_from_the_header",
    ),
    Mutant(
        "finite numbers over HTTP",
        "lam.service.requests",
        'pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)',
        'pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)',
        SERVICE + "test_app.py::test_wrong_embeddings_change_nothing",
    ),
    Mutant(
        "finite vectors in an index",
        "lam.retrieval.index.checks:check_unit_lengths",
        'check_finite("embeddings", _)',
        "None",
        "tests/retrieval/index/test_faiss_index.py::test_bad_embeddings_are_refused_everywhere_and_change_nothing",
    ),
    Mutant(
        "size of what a file unpacks to",
        "lam.gallery.shards:_read",
        "_refuse_bomb(_)",
        "None",
        "tests/inputs/test_bombs.py::test_a_bomb_is_refused_before_it_is_unpacked",
    ),
    Mutant(
        "no pickle is read",
        "lam.gallery.shards:_read",
        "np.load(file, allow_pickle=False)",
        "np.load(file, allow_pickle=True)",
        "tests/inputs/test_bombs.py::test_no_pickle_is_read",
    ),
    Mutant(
        "another worker for one that died",
        "lam.service.workers:Worker._supervise",
        "self.restarts += 1",
        "return",
        SERVICE + "test_workers.py::test_a_worker_that_dies_is_replaced",
    ),
    Mutant(
        "one process a folder",
        "lam.utils.files:locked",
        "fcntl.flock(_, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "None",
        SERVICE + "test_server.py::test_a_second_process_is_refused",
    ),
)


def copied(folder: Path) -> Path:
    """A copy of the files that git tracks, or would track, in their present state."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def exit_code(root: Path, *tests: str) -> int:
    """Run tests in the copy: pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout=120", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, check=False, stdout=subprocess.DEVNULL).returncode


def outcome(root: Path, mutant: Mutant) -> dict[str, Any]:
    """The result of a mutant; afterwards its file is as before."""
    path = root / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(), encoding="utf-8")
    code = exit_code(root, mutant.test)
    path.write_text(whole, encoding="utf-8")
    ending = {GREEN: "survived", RED: "red"}.get(code, f"not tested: pytest ended with {code}")
    return {"name": mutant.name, "function": mutant.function, "test": mutant.test, "outcome": ending}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", nargs="+", help="those with one in the name; others stay as they are")
    words = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if words is None or any(word in mutant.name for word in words)]
    known = json.loads((RESULTS / "mutants.json").read_text())["mutants"] if words else []
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        unmutated = exit_code(root, *dict.fromkeys(mutant.test for mutant in chosen))
        rows = {row["name"]: row for row in [*known, *(outcome(root, mutant) for mutant in chosen)]}
    results = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
    write("mutants", {"tests_without_mutants": "green" if unmutated == GREEN else "red", "mutants": results})
    return 0 if unmutated == GREEN and {row["outcome"] for row in results} == {"red"} else 1


if __name__ == "__main__":
    sys.exit(main())

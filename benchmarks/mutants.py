"""Whether the tests notice when a check is taken out: each mutant lacks one, and a named test must fail for it.

    python benchmarks/mutants.py

Works in a copy of the repository and writes results/mutants.json. A mutant is what a file has exactly once and what is
put in its place; where the file no longer has it, the mutant is refused, so that the list cannot outlive the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from timing import write

ROOT = Path(__file__).parent.parent
GREEN, RED = 0, 1  # pytest's exit codes; others mean that nothing was tested


@dataclass(frozen=True)
class Mutant:
    """A check that is taken out.

    Attributes:
        name: of what is missing.
        file: in which it was.
        old: what the file has once.
        new: what takes its place.
        tests: those that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """The text of the file without the check.

        Raises:
            ValueError: where the file does not have it exactly once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has what is to be taken out {found} times, not once")
        return text.replace(self.old, self.new)


FILES, SERVICE, GALLERY = "tests/utils/test_files.py::", "tests/service/", "tests/gallery/"
MUTANTS = (
    Mutant(
        "fsync of a file",
        "lam/utils/files.py",
        '        with temporary.open("rb") as file:\n            os.fsync(file.fileno())\n',
        "",
        (FILES + "test_the_file_is_synced_before_it_gets_its_name",),
    ),
    Mutant(
        "fsync of its folder",
        "lam/utils/files.py",
        "    sync_folder(path.parent)\n",
        "",
        (FILES + "test_the_file_is_synced_before_it_gets_its_name",),
    ),
    Mutant(
        "rename: a file is written in place",
        "lam/utils/files.py",
        "    temporary = Path(name)\n",
        "    temporary = path\n",
        (FILES + "test_a_failing_writer_leaves_the_old_file",),
    ),
    Mutant(
        "SHA-256 of a file",
        "lam/utils/files.py",
        "        if sha256_of(path) != expected:\n",
        "        if False:\n",
        (FILES + "test_every_cut_and_every_flipped_bit_is_caught_and_named",),
    ),
    Mutant(
        "content hash of a row",
        "lam/gallery/store.py",
        "if item is None or item.sha256 != sha256]",
        "if item is None]",
        (GALLERY + "test_store.py::test_an_altered_row_is_named_and_can_be_dropped",),
    ),
    Mutant(
        "ledger over all rows",
        "lam/gallery/store.py",
        "        if not bad and (rows, digest) == (counted, xor):\n",
        "        if not bad:\n",
        (GALLERY + "test_store.py::test_a_row_that_is_missing_is_noticed",),
    ),
    Mutant(
        "SQLite waits for the disk",
        "lam/gallery/store.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=NORMAL",
        (GALLERY + "test_store.py::test_every_connection_waits_for_the_disk_and_overwrites_what_is_deleted",),
    ),
    Mutant(
        "SQLite overwrites what is deleted",
        "lam/gallery/store.py",
        "PRAGMA secure_delete=ON",
        "PRAGMA secure_delete=OFF",
        (GALLERY + "test_store.py::test_what_is_deleted_is_in_no_file",),
    ),
    Mutant(
        "acknowledged only once written",
        "lam/service/engine.py",
        "        return await asyncio.shield(self._done(self.writer.submit(operation)))\n",
        "        self.writer.submit(operation)\n        return Change(created=True)\n",
        (SERVICE + "test_app.py::test_a_disk_that_is_full_is_507_and_searches_go_on",),
    ),
    Mutant(
        "size of a body",
        "lam/service/limits.py",
        "                if size > limit:\n                    raise too_large\n",
        "",
        (SERVICE + "test_limits.py::test_a_body_of_the_limit_passes_and_one_more_byte_does_not",),
    ),
    Mutant(
        "size of all bodies together",
        "lam/service/limits.py",
        "        if self._held > self._settings.max_held:\n",
        "        if False:\n",
        (SERVICE + "test_limits.py::test_all_bodies_together_are_bounded_and_let_go",),
    ),
    Mutant(
        "memory taken from clients that do not read",
        "lam/service/limits.py",
        "            self._make_room()\n",
        "            pass\n",
        (SERVICE + "test_connections.py::test_clients_that_do_not_read_take_no_memory_from_others",),
    ),
    Mutant(
        "size of a body of JSON",
        "lam/service/limits.py",
        "        return self._max_json if is_json and path != PAIRS else self._settings.max_body\n",
        "        return self._settings.max_body\n",
        (SERVICE + "test_bodies.py::test_json_has_a_limit_of_its_own",),
    ),
    Mutant(
        "deadline of reading an answer",
        "lam/service/connections.py",
        '            self._await("reading")\n',
        "            self._await(None)\n",
        (SERVICE + "test_connections.py::test_an_answer_must_be_read_in_time",),
    ),
    Mutant(
        "connections in all",
        "lam/service/connections.py",
        "        if room and (len(self._open) < self._most or self._one_gives_way()):\n",
        "        if room:\n",
        (SERVICE + "test_connections.py::test_one_too_many_is_refused_where_all_are_at_work",),
    ),
    Mutant(
        "connections of one client",
        "lam/service/connections.py",
        "self._of[new.address] < self._of_client or self._one_gives_way(new.address)",
        "True",
        (SERVICE + "test_connections.py::test_one_client_cannot_take_all",),
    ),
    Mutant(
        "small chunks of a body",
        "lam/service/connections.py",
        "            if self._chunks > _CHUNKS + self._size // _CHUNK:\n",
        "            if False:\n",
        (SERVICE + "test_connections.py::test_a_body_of_very_many_small_chunks_is_refused",),
    ),
    Mutant(
        "deadline of a body",
        "lam/service/limits.py",
        "await asyncio.wait_for(receive(), max(left, 0.001))",
        "await receive()",
        (SERVICE + "test_limits.py::test_a_body_that_drips_is_refused_in_time",),
    ),
    Mutant(
        "API key",
        "lam/service/limits.py",
        "        if not hmac.compare_digest(given, self._key):\n",
        "        if False:\n",
        (SERVICE + "test_limits.py::test_a_key_is_asked_for_where_there_is_one",),
    ),
    Mutant(
        "host, where there is no key",
        "lam/service/limits.py",
        "        if self._key is None and name not in LOCAL_HOSTS:\n",
        "        if False:\n",
        (SERVICE + "test_limits.py::test_without_a_key_other_names_for_this_machine_are_refused",),
    ),
    Mutant(
        "pixels of an image",
        "lam/service/images.py",
        "    if image.width * image.height > settings.max_pixels:\n",
        "    if False:\n",
        (SERVICE + "test_images.py::test_too_many_pixels_are_refused_from_the_header",),
    ),
    Mutant(
        "finite numbers over HTTP",
        "lam/service/models.py",
        "strict=True",
        "strict=False",
        (SERVICE + "test_app.py::test_wrong_embeddings_change_nothing",),
    ),
    Mutant(
        "finite vectors in an index",
        "lam/retrieval/index/entries.py",
        '    refuse_non_finite("embeddings", embeddings.mean)\n',
        "",
        ("tests/retrieval/index/test_faiss_index.py::test_bad_embeddings_are_refused_everywhere_and_change_nothing",),
    ),
    Mutant(
        "size of what a file unpacks to",
        "lam/gallery/shards.py",
        "        _refuse_bomb(path)\n",
        "",
        ("tests/inputs/test_bombs.py::test_a_bomb_is_refused_before_it_is_unpacked",),
    ),
    Mutant(
        "no pickle is read",
        "lam/gallery/shards.py",
        "np.load(file, allow_pickle=False)",
        "np.load(file, allow_pickle=True)",
        ("tests/inputs/test_bombs.py::test_no_pickle_is_read",),
    ),
    Mutant(
        "another worker for one that died",
        "lam/service/workers.py",
        "                self.restarts += 1\n                time.sleep(_PAUSE)\n",
        "                return\n",
        (SERVICE + "test_workers.py::test_a_worker_that_dies_is_replaced",),
    ),
    Mutant(
        "one process a folder",
        "lam/utils/files.py",
        "            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        (SERVICE + "test_server.py::test_a_second_process_is_refused",),
    ),
)


def copied(folder: Path) -> Path:
    """A copy of what git tracks or would, as it stands here."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def tried(root: Path, tests: tuple[str, ...]) -> int:
    """Run tests in the copy, and give pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout=120", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, check=False, stdout=subprocess.DEVNULL).returncode


def outcome(root: Path, mutant: Mutant) -> str:
    """What came of a mutant, whose file is as before when this returns."""
    path = root / mutant.file
    whole, changed = path.read_text(encoding="utf-8"), mutant.applied(root)
    path.write_text(changed, encoding="utf-8")
    code = tried(root, mutant.tests)
    path.write_text(whole, encoding="utf-8")
    return {GREEN: "survived", RED: "red"}.get(code, f"not tested: pytest ended with {code}")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        unmutated = tried(root, tuple(dict.fromkeys(test for mutant in MUTANTS for test in mutant.tests)))
        found = {mutant.name: outcome(root, mutant) for mutant in MUTANTS}
    rows = [
        {"name": one.name, "file": one.file, "taken_out": one.old, "tests": one.tests, "outcome": found[one.name]}
        for one in MUTANTS
    ]
    write("mutants", {"tests_without_mutants": "green" if unmutated == GREEN else "red", "mutants": rows})
    return 0 if unmutated == GREEN and set(found.values()) == {"red"} else 1


if __name__ == "__main__":
    sys.exit(main())

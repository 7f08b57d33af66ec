"""The runs of one service by name. While requests arrive, a run can be replaced, or its calibration read again."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from lam.service.app import Site, site_of
from lam.service.engine import Engine

PREFIX = "/runs/"
_LOOK = 0.05  # seconds between checks whether a replaced run has answered its last request
_PATIENCE = 30.0  # seconds for which a reload waits for the last answers of the replaced run
_LOG = logging.getLogger(__name__)


class Sites:
    """Sites by name, under `/runs/NAME/`; the first also answers at the root."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = {site.name: site for site in sites}
        self._going: dict[Site, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    @property
    def first(self) -> Site:
        """The site at the root."""
        return next(iter(self._sites.values()))

    def find(self, path: str) -> tuple[Site | None, str]:
        """The site of a path, and the path below it; None for an unknown name."""
        if not path.startswith(PREFIX):
            return self.first, path
        name, slash, rest = path.removeprefix(PREFIX).partition("/")
        return (self._sites.get(name) if slash else None), f"/{rest}"

    def exchange(self, new: Site) -> None:
        """Send new requests to `new`, and close the old site of this name once its requests are answered."""
        old, self._sites[new.name] = self._sites[new.name], new
        self._going[old] = asyncio.create_task(self._retire(old))

    async def wait_until_closed(self, name: str, seconds: float) -> None:
        """Wait until the replaced sites of this name are closed, for at most `seconds`."""
        if going := [task for site, task in self._going.items() if site.name == name]:
            await asyncio.wait(going, timeout=seconds)

    async def _retire(self, old: Site) -> None:
        while old.requests:
            await asyncio.sleep(_LOOK)
        await asyncio.to_thread(old.close)
        del self._going[old]

    def close(self) -> None:
        """Release all runs."""
        for site in (*self._sites.values(), *self._going):
            site.close()


class ServedRuns:
    """Opened runs by name; the first is also served at the root.

    A folder may be a symbolic link. If the path leads to another run now, a reload opens the new run with its own
    gallery, sends new requests to the new run, and closes the old run after its last answer.
    """

    def __init__(self, folders: Mapping[str, Path], open_run: Callable[[Path], Engine]) -> None:
        self._folders, self._open = dict(folders), open_run
        self._reloading = asyncio.Lock()
        self.engines: dict[str, Engine] = {}
        try:
            for name, folder in self._folders.items():
                self.engines[name] = open_run(_leads_to(folder))
            self.sites = Sites([self._site(name, engine) for name, engine in self.engines.items()])
        except BaseException:
            for engine in self.engines.values():
                engine.close()
            raise

    async def reload(self, name: str) -> Engine:
        """The engine of the run to which the folder now leads; for the same run, only the calibration is read again.

        If reading fails, a `ValueError` or an `OSError` says why, and the old run or calibration stays.
        """
        async with self._reloading:
            engine, folder = self.engines[name], _leads_to(self._folders[name])
            if folder == engine.run.folder and engine.run.is_in_place:
                await asyncio.to_thread(engine.recalibrate)
                return engine
            await self.sites.wait_until_closed(name, _PATIENCE)  # a run that still closes may be in this folder
            new = await asyncio.to_thread(self._open, folder)
            self.sites.exchange(await asyncio.to_thread(self._site, name, new))
            self.engines[name] = new
            return new

    async def reload_all(self) -> None:
        """Reload all runs; a failure is logged."""
        for name in self._folders:
            try:
                engine = await self.reload(name)
            except Exception as error:  # nobody waits for an answer, so an error that is not logged is lost
                expected = isinstance(error, OSError | ValueError)
                _LOG.error("%s stays as it was: %s", name, error, exc_info=None if expected else error)
            else:
                _LOG.warning("%s was read anew: %s", name, engine.run.folder)

    def _site(self, name: str, engine: Engine) -> Site:
        root = "" if name == next(iter(self._folders)) else f"{PREFIX}{quote(name)}"
        site = site_of(engine, partial(self.reload, name), name=name, root=root)
        site.describe()  # built now: the first request with a parameter would delay all others
        return site


def _leads_to(folder: Path) -> Path:
    """The folder behind links. A link to itself is returned unchanged, where `Path.resolve` may raise."""
    return Path(os.path.realpath(folder))

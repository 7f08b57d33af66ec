"""`ServedRuns`: opens runs from folders, and reloads them after a change of the folder or the calibration."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

from lam.service.app import site_of
from lam.service.engine import Engine
from lam.service.sites import PREFIX, Site, Sites

_PATIENCE = 30.0  # seconds for which a reload waits for the last answers of the replaced run
_LOG = logging.getLogger(__name__)


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

"""The runs of one service by name; a run can be replaced while requests arrive."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp

Count = Callable[[str, str, int, float], None]
PREFIX = "/runs/"
_LOOK = 0.05  # seconds between checks whether a replaced run has answered its last request


@dataclass(eq=False)
class Site:
    """A run that is served.

    Attributes:
        max_json: greatest number of bytes of a JSON body.
        count: called for every answer with its route, method, status and seconds.
        describe: builds the schema of its routes, which takes a tenth of a second.
        requests: number of requests that are being answered.
    """

    name: str
    app: ASGIApp
    max_json: int
    count: Count
    close: Callable[[], object] = bool
    describe: Callable[[], object] = bool
    requests: int = 0


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

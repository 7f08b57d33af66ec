"""The routes of those who run the service."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from fastapi import FastAPI, Response

from lam.service import models
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.routes.parameters import json_response
from lam.service.schema import responses_of


def add_admin(app: FastAPI, engine: Engine, reload: Callable[[], Awaitable[Engine]]) -> None:
    """Add the routes of backups and reloads."""

    @app.post("/v1/backup", status_code=201, responses=responses_of(models.BackupResponse, 201))
    async def create_backup() -> Response:
        """Copy the run with its items of this moment; answered once the copy is checked and on disk."""
        backup = await engine.back_up()
        files = [models.FileFields(**asdict(file)) for file in backup.files]
        answer = models.BackupResponse(
            name=backup.folder.name, created=backup.created, items=backup.items, bytes=backup.bytes, files=files
        )
        return json_response(answer, 201)

    @app.post("/v1/reload", responses=responses_of(models.ReloadResponse))
    async def reload_run() -> Response:
        """Read the calibration anew; if the run's folder is a link to another run now, exchange the runs."""
        try:
            now = await reload()
        except (OSError, ValueError) as error:
            raise ServiceError(
                409, f"the run stays as it was: {error}", allowed="a run that `lam serve` opens"
            ) from None
        size = len(now.gallery)
        answer = models.ReloadResponse(
            run=now.run.folder.name,
            exchanged=now is not engine,
            calibration=now.responder.state(size),
            gallery_size=size,
        )
        return json_response(answer)

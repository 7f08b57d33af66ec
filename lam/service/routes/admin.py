"""The routes of those who run the service."""

from dataclasses import asdict

from fastapi import FastAPI, Response

from lam.service import models
from lam.service.engine import Engine
from lam.service.models import responses_of
from lam.service.routes.parameters import json_response


def add_admin(app: FastAPI, engine: Engine) -> None:
    """Add the routes of backups."""

    @app.post("/v1/backup", status_code=201, responses=responses_of(models.BackupResponse, 201))
    async def create_backup() -> Response:
        """Copy the run with its items of this moment; answered once the copy is checked and on disk."""
        backup = await engine.back_up()
        files = [models.FileFields(**asdict(file)) for file in backup.files]
        answer = models.BackupResponse(
            name=backup.folder.name, created=backup.created, items=backup.items, bytes=backup.bytes, files=files
        )
        return json_response(answer, 201)

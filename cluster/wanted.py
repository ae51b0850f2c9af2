"""The wanted state of a deployment, where a controller that has come back finds it."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from core.config import Config
from core.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Wanted:
    controller: str  # the id of the controller whose state this is; another one's is no concern
    config: Config  # as the last operation left it
    address: str  # host:port of ClusterService, where routers look for it again
    is_ending: bool = False  # nothing is wanted any more


@dataclass(frozen=True, slots=True)
class WantedFile:
    """One file on the controller's node, which only its owner may read. It is written before a
    change begins, and whole or not at all."""

    path: Path

    def load(self, controller: str) -> Wanted | None:
        """What the controller with this id has left; None if there is nothing of it."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            data = json.loads(self.path.read_text())
            if data["controller"] == controller:
                config = Config.model_validate_json(json.dumps(data["config"]))
                return Wanted(controller, config, data["address"], data["is_ending"])
        return None

    def save(self, wanted: Wanted) -> None:
        """Raises UnavailableError if it cannot be written."""
        data = {
            "controller": wanted.controller,
            "config": wanted.config.model_dump(mode="json"),
            "address": wanted.address,
            "is_ending": wanted.is_ending,
        }
        temporary = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                json.dump(data, file)
            temporary.replace(self.path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.path}: {error.strerror}") from error

"""The wanted state of a deployment, where a controller that has come back finds it: in a file of
its node, and with every worker, which is where it looks on another node."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from core.config import Config
from core.errors import ConfigError, UnavailableError


@dataclass(frozen=True, slots=True)
class Wanted:
    controller: str  # the id of the controller whose state this is; another one's is no concern
    config: Config  # as the last operation left it
    address: str  # host:port that ClusterService is bound to, where routers look for it again
    node: str = ""  # the address of the node that it was on
    is_ending: bool = False  # nothing is wanted any more
    version: int = 0  # grows with every change

    def to_json(self) -> str:
        return json.dumps(
            {
                "controller": self.controller,
                "config": self.config.model_dump(mode="json"),
                "address": self.address,
                "node": self.node,
                "is_ending": self.is_ending,
                "version": self.version,
            }
        )

    @classmethod
    def from_json(cls, text: str, controller: str) -> "Wanted | None":
        """None if it is not what the controller with this id has left."""
        with contextlib.suppress(ValueError, KeyError, TypeError, ConfigError):
            data = json.loads(text)
            if data["controller"] == controller:
                config = Config.model_validate_json(json.dumps(data.pop("config")))
                return cls(config=config, **data)
        return None


def next_version(before: int) -> int:
    """By the clock, so that it grows from node to node too."""
    return max(before + 1, time.time_ns() // 1_000_000)


@dataclass(slots=True)
class Notice:
    """What every worker is told to remember of its controller."""

    address: str = ""  # of ClusterService, from other machines; "": it is not reached from there
    wanted: str = ""  # a Wanted as JSON


@dataclass(frozen=True, slots=True)
class WantedFile:
    """One file on the controller's node, which only its owner may read. It is written before a
    change begins, and whole or not at all."""

    path: Path

    def load(self, controller: str) -> Wanted | None:
        """What the controller with this id has left; None if there is nothing of it."""
        with contextlib.suppress(OSError, ValueError):
            return Wanted.from_json(self.path.read_text(), controller)
        return None

    def save(self, wanted: Wanted) -> None:
        """Raises UnavailableError if it cannot be written."""
        temporary = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                file.write(wanted.to_json())
            temporary.replace(self.path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.path}: {error.strerror}") from error

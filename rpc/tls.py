"""TLS between the processes of one deployment, and towards clients.

Inside, both ends show a certificate that the deployment's own authority has signed, for one name,
`INTERNAL_NAME`, whatever the host is: workers come and go, and their addresses are in no
certificate. Which files is known to a process from its environment, like the cluster token; who
reads a configuration puts them there. Servers look at their files at each handshake, and take
changed ones; a channel has what was there when it was made.
"""

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from core.config import Config
from core.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
INTERNAL_NAME = "pdserve.internal"
_VARIABLES = {
    "ca_file": "PDSERVE_TLS_CA_FILE",
    "cert_file": "PDSERVE_TLS_CERT_FILE",
    "key_file": "PDSERVE_TLS_KEY_FILE",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `ca_file`: of the authority that the other side's certificate must be of; None:
    the other side needs none."""

    cert_file: str
    key_file: str
    ca_file: str | None = None

    def check(self, key: str) -> None:
        """Raises ConfigError that names `key`, of the configuration, and what is wrong."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.cert_file, self.key_file)
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
        except OSError as error:  # ssl.SSLError too
            files = ", ".join(filter(None, (self.cert_file, self.key_file, self.ca_file)))
            raise ConfigError(f"{key}: cannot use {files}: {error}") from error

    def version(self) -> tuple[int, ...]:
        """Another one after any of the files has changed. Raises OSError."""
        files = filter(None, (self.cert_file, self.key_file, self.ca_file))
        return tuple(Path(file).stat().st_mtime_ns for file in files)


def internal_tls() -> TlsFiles | None:
    """What this process uses towards others of its deployment; None: plain connections."""
    values = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    if not any(values.values()):
        return None
    missing = [_VARIABLES[name] for name, value in values.items() if not value]
    if missing:
        raise ConfigError(f"TLS between processes: also set {', '.join(missing)}")
    return TlsFiles(**values)  # type: ignore[arg-type]


def use_internal_tls(config: Config) -> None:
    """For this process and its children: what `tls` of the configuration says, if it is there.
    Before the first server or channel is made. Raises ConfigError."""
    if config.tls is not None:
        for name, variable in _VARIABLES.items():
            os.environ[variable] = str(Path(getattr(config.tls, name)).absolute())
    files = internal_tls()
    if files is not None:
        files.check("tls")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For `add_secure_port`. With a `ca_file` every client needs a certificate of its signing."""
    # Asked at each handshake, in a thread of gRPC's. None: as before.
    news = _news_of(files, lambda: _read(files))
    return grpc.dynamic_ssl_server_credentials(
        _read(files), news, require_client_authentication=files.ca_file is not None
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """As `server_credentials`, for servers that are not gRPC's."""
    news = _news_of(files, lambda: _context(files, ssl.PROTOCOL_TLS_SERVER))
    context = current = _context(files, ssl.PROTOCOL_TLS_SERVER)

    def look(handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal current
        current = news() or current
        handshake.context = current

    context.sni_callback = look
    return context


def _news_of(files: TlsFiles, make: Callable[[], T]) -> Callable[[], T | None]:
    """Asked again and again, gives what `make` makes of the files when they have changed since;
    None if they have not, or cannot be used."""
    version = files.version()

    def news() -> T | None:
        nonlocal version
        try:
            now = files.version()
            if now == version:
                return None
            files.check("tls")
            version = now
            logger.info("certificates have changed: %s", files.cert_file)
            return make()
        except (OSError, ConfigError) as error:
            logger.error("the last good certificates stand: %s", error)
            return None

    return news


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """As `channel_credentials`, for clients that are not gRPC's. Raises OSError."""
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert_file, files.key_file)
    if files.ca_file is not None:
        context.load_verify_locations(files.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    roots = Path(files.ca_file).read_bytes() if files.ca_file is not None else None
    return grpc.ssl_channel_credentials(
        roots, Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes()
    )


def _read(files: TlsFiles) -> Any:
    pair = Path(files.key_file).read_bytes(), Path(files.cert_file).read_bytes()
    roots = Path(files.ca_file).read_bytes() if files.ca_file is not None else None
    return grpc.ssl_server_certificate_configuration([pair], roots)

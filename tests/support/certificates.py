"""Real certificates, made with the openssl command as SECURITY.md shows it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from rpc.tls import INTERNAL_NAME, TlsFiles


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Authority:
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        folder.mkdir(parents=True, exist_ok=True)
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "30", "-subj", f"/CN={folder.name}", "-keyout", str(folder / "ca.key"),
            "-out", str(folder / "ca.crt"),
        )  # fmt: skip
        return cls(folder)

    @property
    def file(self) -> str:
        return str(self.folder / "ca.crt")

    def issue(self, name: str, alt: str = f"DNS:{INTERNAL_NAME}") -> TlsFiles:
        """`<name>.crt` and `<name>.key`, in the place of earlier ones."""
        base = self.folder / name
        request, key, cert = (str(base.with_suffix(s)) for s in (".csr", ".key", ".crt"))
        openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
            f"/CN={name}", "-keyout", key, "-out", request,
        )  # fmt: skip
        extensions = base.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alt}\n")
        openssl(
            "x509", "-req", "-in", request, "-CA", self.file, "-CAkey",
            str(self.folder / "ca.key"), "-CAcreateserial", "-days", "30", "-extfile",
            str(extensions), "-out", cert,
        )  # fmt: skip
        return TlsFiles(cert, key, self.file)

"""Certificates and tokens of a test's own, made with the openssl command."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """Signs certificates for 127.0.0.1 and localhost; `ca` is the file to trust."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca),
        )

    def sign(self, name: str) -> tuple[Path, Path]:
        """(certificate, key); again with the same name: new ones in the place of the old."""
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        names.write_text(f"subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:{name}\n")
        fresh = {path: path.with_suffix(path.suffix + ".new") for path in (certificate, key)}
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", fresh[key], "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", 1, "-extfile", names, "-out", fresh[certificate]),
        )
        for path, new in fresh.items():
            new.replace(path)
        return certificate, key


def tokens_file(folder: Path, tokens: dict[str, str]) -> Path:
    """Of "role tenant" by token."""
    path = folder / "tokens"
    lines = [f"{hashlib.sha256(token.encode()).hexdigest()} {rest}\n" for token, rest in tokens.items()]
    path.write_text("".join(lines))
    return path


def token_file(folder: Path, name: str, token: str) -> Path:
    path = folder / name
    path.write_text(token + "\n")
    return path

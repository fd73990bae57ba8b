"""TLS and tokens of servers that are started on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from heavywater.security import TOKEN, TOKEN_FILE, Security


@dataclass(frozen=True)
class LocalSecurity:
    """Files of CacheConfig's and WorkerConfig's fields; without any the servers talk in plaintext, on loopback.

    One certificate serves all of them, and is shown where clients must show one.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None  # of who signed the certificate
    client_ca_file: Path | None = None  # clients must show a certificate that one of these has signed
    tokens_file: Path | None = None  # who may call
    worker_token_file: Path | None = None  # the workers' own token

    def __post_init__(self) -> None:
        if (self.cert_file, self.key_file, self.ca_file).count(None) not in (0, 3):
            raise ValueError("want a certificate, its key and the file of who signed it, or none of the three")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("clients can only show certificates over TLS, want a certificate and its key, too")
        if bool(self.tokens_file) != bool(self.worker_token_file):
            raise ValueError("want the file of tokens and the workers' own token, or neither")

    def server_flags(self) -> dict[str, object]:
        """Of every server."""
        flags = {
            "tls_cert_file": self.cert_file,
            "tls_key_file": self.key_file,
            "tls_client_ca_file": self.client_ca_file,
            "tokens_file": self.tokens_file,
        }
        return {name: path for name, path in flags.items() if path is not None}

    def worker_flags(self) -> dict[str, object]:
        """Of workers, beside those."""
        flags = {"tls_ca_file": self.ca_file, "token_file": self.worker_token_file}
        return {name: path for name, path in flags.items() if path is not None}

    def client(self) -> Security:
        """How this process calls them; its token is the environment's, and only where they want one."""
        shows = self.client_ca_file is not None
        return Security(
            ca_file=self.ca_file or "",
            cert_file=(self.cert_file or "") if shows else "",
            key_file=(self.key_file or "") if shows else "",
            token=os.environ.get(TOKEN, "") if self.tokens_file else "",
            token_file=os.environ.get(TOKEN_FILE, "") if self.tokens_file else "",
        )

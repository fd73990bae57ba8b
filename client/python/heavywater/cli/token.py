"""heavywater token"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import typer

_ROLES = ("client", "worker", "admin")


def token(
    role: Annotated[str, typer.Option(help="client, worker or admin.")] = "client",
    tenant: Annotated[
        str, typer.Option(help="Whose sequences a client has; * for every tenant's, as gateways need it.")
    ] = "",
) -> None:
    """Make a token, and the line of the servers' tokens_file (which keeps only its hash)."""
    if role not in _ROLES:
        raise ValueError(f"--role {role}, want one of {', '.join(_ROLES)}")
    if role == "client" and not tenant:
        raise ValueError("no --tenant, want the name of the client's, or * for every tenant's sequences")
    if role != "client":
        tenant = tenant or "*"
    if role != "client" and tenant != "*":
        raise ValueError(f"--tenant {tenant} with --role {role}: workers and admins act for every tenant, want *")
    if not tenant or len(tenant.encode()) > 128 or any(letter.isspace() for letter in tenant):
        raise ValueError(f'--tenant "{tenant}", want a name of 1 to 128 bytes without blanks')
    made = secrets.token_urlsafe(32)
    typer.echo(f"token        {made}")
    typer.echo(f"tokens_file  {hashlib.sha256(made.encode()).hexdigest()} {role} {tenant}")

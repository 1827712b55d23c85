"""Servers of a run on one machine listen on its loopback interface, out of reach of other machines.

gloo accepts every connection, and Ray every connection with the token of this user.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

ADDRESS_FILE = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray/ray_current_cluster"
"""File to which `ray start` writes the address of this machine's cluster."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
RAY_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The only switch that makes Ray 2.60 use the address 127.0.0.1 for a node: it replaces this address in `ray.init`."""


def gloo_on_loopback() -> None:
    """Make gloo use the loopback interface in this process, unless the environment names another interface."""
    # other systems have other names for it, so they keep gloo's own choice
    if sys.platform == "linux":
        os.environ.setdefault(GLOO_INTERFACE, "lo")


def own_ray_on_loopback() -> None:
    """Make a Ray cluster that this process starts listen only on loopback; call it before ray is imported."""
    if "ray" not in sys.modules and not running_cluster():
        os.environ.setdefault(RAY_BEYOND_LOOPBACK, "0")


def running_cluster() -> str:
    """The address of the Ray cluster that the environment names or that this machine belongs to; empty if none."""
    left = ADDRESS_FILE.read_text().strip() if ADDRESS_FILE.exists() else ""
    return os.environ.get("RAY_ADDRESS") or left


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1")


def listen_at(host: str) -> socket.socket:
    """Open a socket that listens on a free port of this address only."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

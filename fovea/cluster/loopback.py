"""Servers of a run that has one machine: they listen on its loopback interface, out of reach of other machines.

gloo takes every connection that comes, and Ray every one that has the token of this user.
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
"""The only switch by which Ray 2.60 gives a node the address 127.0.0.1: it replaces one that `ray.init` is given."""


def gloo_on_loopback() -> None:
    """Have the process groups of this process meet on the loopback interface, unless the environment names another."""
    # elsewhere the interface has other names, and gloo's own choice stays
    if sys.platform == "linux":
        os.environ.setdefault(GLOO_INTERFACE, "lo")


def own_ray_on_loopback() -> None:
    """Have a Ray that this process starts for itself, and all that it starts, listen only on loopback.

    Must be called before ray is imported, which reads the environment then. A cluster that is there is left alone.
    """
    if "ray" not in sys.modules and not running_cluster():
        os.environ.setdefault(RAY_BEYOND_LOOPBACK, "0")


def running_cluster() -> str:
    """The address of the Ray cluster that the environment names, or that this machine is a node of; empty for none."""
    left = ADDRESS_FILE.read_text().strip() if ADDRESS_FILE.exists() else ""
    return os.environ.get("RAY_ADDRESS") or left


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "::1")


def listen_at(host: str) -> socket.socket:
    """A socket that listens on a free port of one address only."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

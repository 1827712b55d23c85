"""Connections for untrusted URLs: to a checked address only, and none of them beyond one deadline.

A host name is resolved once per connection, and the address that is checked is the address that is connected to, so
that a name cannot answer differently a moment later. httpcore2 opens every connection through here, those of redirects
included, and still takes the TLS host name (SNI and certificate) from the URL.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore2

from fovea.errors import BadRowError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
"""Translated as each network chooses (RFC 8215), and public to Python before 3.13, as site-local addresses are."""
_EMBEDDED = (
    ipaddress.ip_network("::/96"),  # IPv4-compatible addresses (RFC 4291, 2.5.5.1), deprecated
    ipaddress.ip_network("::ffff:0:0:0/96"),  # IPv4-translated addresses (RFC 2765, 2.1), for translators of a network
)
"""Some networks lead these to the IPv4 address inside; to Python they are public."""
_AZURE_HOST = ipaddress.ip_address("168.63.129.16")
"""The host of every virtual machine of Azure, reachable from nowhere else ("What is IP address 168.63.129.16?")."""


class Deadline:
    """A point in time that all operations of a transfer share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Time until the deadline, above 0; httpcore2.TimeoutException once it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise httpcore2.TimeoutException("the deadline has passed")
        return left


class PinnedNetwork(httpcore2.NetworkBackend):
    """TCP connections to public addresses, or to any with `allow_private_addresses`, until a deadline.

    A private address is a BadRowError naming `where`; failures of the network are httpcore2's exceptions.
    """

    def __init__(self, where: str, deadline: Deadline, *, allow_private_addresses: bool) -> None:
        self._where = where
        self._deadline = deadline
        self._allow_private_addresses = allow_private_addresses
        self._sockets = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        address = self._resolved(host, port)
        stream = self._sockets.connect_tcp(address, port, self._deadline.seconds_left(), local_address, socket_options)
        return _TimedStream(stream, self._deadline)

    def _resolved(self, host: str, port: int) -> str:
        """The first address of a host name, all of whose addresses must be allowed."""
        try:
            found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(str(error)) from error
        private = [address for address in found if not is_public(address)]
        if private and not self._allow_private_addresses:
            raise BadRowError(
                f"{self._where}: {host} is at {private[0]}, an address of this machine or a private network, which "
                "rows may not reach; set data.allow_private_addresses=true if you trust the rows, or "
                "data.on_bad_row=skip",
                "url_private_address",
            )
        return found[0]


class _TimedStream(httpcore2.NetworkStream):
    """A stream whose every operation is given the time until the deadline.

    A server that sends a byte now and then would never exceed a timeout that starts anew with each read.
    """

    def __init__(self, stream: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.seconds_left())

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline.seconds_left())
        return _TimedStream(stream, self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the open Internet, looking inside IPv6 addresses that wrap an IPv4 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _LOCAL_NAT64 or ip.is_site_local or any(ip in network for network in _EMBEDDED):
            return False
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and ip != _AZURE_HOST

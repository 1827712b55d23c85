"""Images by URL, from a real server: limits that hold, addresses that are refused, one line for what goes wrong."""

from __future__ import annotations

import errno
import io
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows import fetch as fetch_module
from fovea_gym.rows.access import UrlLimits
from fovea_gym.rows.cells import image_refs
from fovea_gym.rows.fetch import MAX_FAILURES, FailedHosts, FetchedFiles, download, fetch, is_public
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef
from gym_tests.images import png
from gym_tests.rows.three_rows import opened
from gym_tests.rows.web import Site, served
from gym_tests.tables import table

WHERE = "rows.jsonl row 3, image 1"
CERTIFICATE = Path(__file__).with_name("images.example.pem")
"""Key and self-signed certificate of a host that is none, valid from 2020 to 2120."""


@pytest.fixture(name="site")
def _site() -> Iterator[Site]:
    with served({"/a.png": png(), "/big": bytes(3 << 20), "/with space.png": png()}) as site:
        yield site


def limits(**changes: object) -> UrlLimits:
    values = {"max_image_mib": 1.0, "url_timeout_seconds": 5.0, "retries": 0, "allow_private_addresses": True}
    return UrlLimits(**{**values, **changes})  # type: ignore[arg-type]


def reason_of(url: str, **changes: object) -> str:
    with pytest.raises(BadRowError) as error:
        fetch(url, WHERE, limits(**changes))
    assert str(error.value).startswith(f"{WHERE}: ")
    assert "data." not in str(error.value)
    assert "\n" not in str(error.value)
    return error.value.reason


def test_an_image_comes_over_http(site: Site) -> None:
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1, fetch=partial(fetch, limits=limits()))
    for name in ("/a.png", "/a.png?size=2", f"/to/{site.url}/a.png", "/to//a.png", "/with space.png"):
        assert opener(ImageRef(source=site.url + name, where=WHERE)).size == (8, 8)
    assert "/a.png?size=2" in site.asked


@table(
    ("path", "reason"),
    [
        *(("/none.png", "url_status_404"), ("/status/403", "url_status_403"), ("/status/503", "url_status_503")),
        *(("/loop", "url_redirects"), ("/to/", "url_redirects"), ("/to/file:///etc/passwd", "url_invalid")),
        *(("/big", "image_too_large"), ("/endless", "image_too_large"), ("/short", "url_unreachable")),
    ],
)
def test_what_a_server_may_do_wrong(path: str, reason: str, site: Site) -> None:
    assert reason_of(site.url + path) == reason


def test_redirects_are_bounded_and_their_bodies_which_may_be_endless_are_not_read(site: Site) -> None:
    twice = f"{site.url}/to//to//a.png"
    assert fetch(twice, WHERE, limits(max_redirects=2)) == png()
    assert reason_of(twice, max_redirects=1) == "url_redirects"
    assert reason_of(f"{site.url}/to//a.png", max_redirects=0) == "url_redirects"
    assert fetch(f"{site.url}/endless-redirect", WHERE, limits()) == png()


def test_a_server_that_drips_or_says_nothing_is_cut_off_in_time(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        for url in (f"{site.url}/drip", f"{site.url}/drip-headers", silent_url):
            started = time.monotonic()
            assert reason_of(url, url_timeout_seconds=0.3) == "url_timeout"
            assert time.monotonic() - started < 5


def test_a_busy_server_is_asked_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_SECONDS", 0.01)
    assert fetch(f"{site.url}/busy-once", WHERE, limits(retries=1)) == b"at last"
    assert reason_of(f"{site.url}/status/503", retries=2) == "url_status_503"
    assert site.asked.count("/status/503") == 3
    assert reason_of(f"{site.url}/none", retries=2) == "url_status_404"
    assert site.asked.count("/none") == 1, "a missing page stays missing"


def test_what_is_no_url_and_nobody_there() -> None:
    for url in ("http://", "http:///a.png", "http://a:b@127.0.0.1/a.png", "http://127.0.0.1:99999/a", "ftp://a.org/b"):
        assert reason_of(url) == "url_invalid", url
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert reason_of(f"http://127.0.0.1:{port}/a.png") == "url_unreachable"
    assert reason_of("http://no-such-host.invalid/a.png") == "url_unreachable"


@table("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433"])
def test_private_addresses_are_refused(host: str, site: Site) -> None:
    (ref,) = image_refs(f"http://{host}:{site.url.rpartition(':')[2]}/a.png", where=WHERE, folder=site.url)
    assert reason_of(str(ref.source), allow_private_addresses=False) == "url_private_address"
    assert not site.asked, "nothing was sent to it"


PUBLIC = [
    *("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822", "::ffff:93.184.216.34"),
    "168.63.129.17",
]
PRIVATE = [
    *("10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "fe80::1%eth0", "fd00::1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::5db8:d822", "fec0::1", "2002:7f00:1::", "::127.0.0.1"),
    *("::93.184.216.34", "::ffff:0:127.0.0.1", "::ffff:0:93.184.216.34", "168.63.129.16", "::ffff:168.63.129.16"),
    "64:ff9b::a83f:8110",
]


@table(("address", "public"), [*((each, True) for each in PUBLIC), *((each, False) for each in PRIVATE)])
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_redirect_to_a_private_address_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first host counts as public here; where it leads to does not."""
    monkeypatch.setattr(fetch_module, "is_public", lambda address: address != "127.0.0.2")
    assert fetch(f"{site.url}/a.png", WHERE, limits(allow_private_addresses=False)) == png()
    url = f"{site.url}/to/http://127.0.0.2:{site.url.rpartition(':')[2]}/a.png"
    assert reason_of(url, allow_private_addresses=False) == "url_private_address"


def test_the_address_that_is_checked_is_the_one_that_is_connected_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that answers with another address each time it is asked (DNS rebinding)."""
    port = int(site.url.rpartition(":")[2])
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1"])
    connected: list[object] = []

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connect(address: tuple[str, int], timeout: float, **_: object) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError("stops here")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert reason_of(f"http://rebinding.example:{port}/a.png", allow_private_addresses=False) == "url_unreachable"
    assert connected == [("93.184.216.34", port)]


@pytest.fixture(name="secure_site")
def _secure_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, list[str | None]]]:
    """A server whose certificate is for images.example and trusted here, and the names asked of it by SNI.

    Both images.example and other.example are at its address.
    """
    asked_names: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    tls.sni_callback = lambda _socket, name, _context: asked_names.append(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    resolve = socket.getaddrinfo

    def resolved(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.0.1" if host.endswith(".example") else host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with served({"/a.png": png()}, tls) as site:
        yield site, asked_names


def test_tls_names_the_host_and_not_its_pinned_address(secure_site: tuple[Site, list[str | None]]) -> None:
    """Another host of this address has no certificate: a redirect to it must not go over the first connection."""
    site, asked_names = secure_site
    port = site.url.rpartition(":")[2]
    assert fetch(f"https://images.example:{port}/a.png", WHERE, limits()) == png()
    assert asked_names == ["images.example"]
    asked_names.clear()
    site.asked.clear()
    assert reason_of(f"https://other.example:{port}/a.png") == "url_unreachable"
    redirect = f"https://images.example:{port}/to/https://other.example:{port}/a.png"
    assert reason_of(redirect) == "url_unreachable"
    assert asked_names == ["other.example", "images.example", "other.example"]
    assert "/a.png" not in site.asked


def test_what_has_come_once_is_kept(site: Site, tmp_path: Path) -> None:
    read = partial(fetch, limits=limits())
    kept = FetchedFiles(tmp_path / "images", 1.0, read)
    assert kept(f"{site.url}/a.png", WHERE) == kept(f"{site.url}/a.png", WHERE) == png()
    again = FetchedFiles(tmp_path / "images", 1.0, read)
    assert again(f"{site.url}/a.png", WHERE) == png()
    assert site.asked == ["/a.png"]
    small = FetchedFiles(tmp_path / "images", len(png()) / 2**30, read)
    assert small(f"{site.url}/a.png?other", WHERE) == png()
    assert len(list((tmp_path / "images").iterdir())) == 1, "no room for another"


def test_what_is_half_written_takes_no_room_in_the_cache(tmp_path: Path) -> None:
    """Another process may rename it at any time, or have been killed over it."""
    (tmp_path / ".0123.partial").write_bytes(bytes(9))
    (tmp_path / ".4567.partial").symlink_to(tmp_path / "renamed")
    kept = FetchedFiles(tmp_path, 10 / 2**30, lambda *_: bytes(5))
    assert kept("https://a.org/b.png", WHERE) == bytes(5)
    assert sum(file.name[0] != "." for file in tmp_path.iterdir()) == 1


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_not_the_servers_fault(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again would not help, and a run that skips bad rows would drop an image that cannot be kept for good."""
    monkeypatch.setattr(os, "replace", full)
    file = io.BytesIO()
    file.write = full  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="No space left on device") as caught:
        download(f"{site.url}/big", WHERE, limits(retries=3), file)
    assert not isinstance(caught.value, BadRowError)
    assert site.asked == ["/big"]
    kept = FetchedFiles(tmp_path, 1.0, partial(fetch, limits=limits()))
    with pytest.raises(OSError, match="No space left on device") as caught:
        kept(f"{site.url}/a.png", WHERE)
    assert not isinstance(caught.value, DataError)
    assert list(tmp_path.iterdir()) == []


LIMITS = UrlLimits(url_timeout_seconds=0.3, retries=0, allow_private_addresses=True)
PAUSE_SECONDS = 60.0


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def hosts(noted: list[str], clock: Clock, pause_seconds: float = PAUSE_SECONDS) -> FailedHosts:
    return FailedHosts(partial(fetch, limits=LIMITS), pause_seconds, noted.append, clock)


def failure_of(read: FailedHosts, url: str) -> str:
    with pytest.raises(BadRowError) as failed:
        read(url, "row 3")
    assert str(failed.value).startswith("row 3: ")
    return failed.value.reason


def test_a_silent_host_costs_three_timeouts_and_one_message() -> None:
    noted: list[str] = []
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        read = hosts(noted, clock)
        assert [failure_of(read, f"http://{host}/{n}.png") for n in range(MAX_FAILURES)] == ["url_timeout"] * 3
        started = time.monotonic()
        assert {failure_of(read, f"http://{host}/{n}.png") for n in range(200)} == {"url_host_failed"}
        assert time.monotonic() - started < 200 * LIMITS.url_timeout_seconds / 4, "none of them waits for its timeout"
        assert len(noted) == 1
        assert noted[0].startswith(f"{host} failed for 3 images in a row, the last one: row 3: the server took more")
        clock.seconds += PAUSE_SECONDS
        assert failure_of(read, f"http://{host}/again.png") == "url_timeout", "one more try"
        assert failure_of(read, f"http://{host}/again.png") == "url_host_failed"
        assert len(noted) == 1
        with served({"/a.png": b"picture"}) as other:
            assert read(f"{other.url}/a.png", "row 4") == b"picture", "another host is asked as ever"


def test_a_host_that_comes_back_is_asked_again() -> None:
    clock = Clock()
    with served({"/a.png": b"picture"}) as site:
        read = hosts([], clock)
        for _ in range(MAX_FAILURES):
            assert failure_of(read, f"{site.url}/status/503") == "url_status_503"
        assert failure_of(read, f"{site.url}/a.png") == "url_host_failed"
        clock.seconds += PAUSE_SECONDS
        assert read(f"{site.url}/a.png", "row 4") == b"picture"
        for _ in range(MAX_FAILURES - 1):
            assert failure_of(read, f"{site.url}/status/503") == "url_status_503", "counted from the start again"
        assert read(f"{site.url}/a.png", "row 4") == b"picture"


def test_what_is_wrong_with_one_image_is_not_the_hosts_fault_and_without_a_pause_each_is_asked_for() -> None:
    with served({"/a.png": b"picture"}) as site:
        read = hosts([], Clock())
        assert {failure_of(read, f"{site.url}/none-{n}") for n in range(9)} == {"url_status_404"}
        assert read(f"{site.url}/a.png", "row 4") == b"picture"
        site.asked.clear()
        read = hosts([], Clock(), pause_seconds=0)
        assert {failure_of(read, f"{site.url}/status/503") for _ in range(5)} == {"url_status_503"}
        assert len(site.asked) == 5


OTHER_PROTOCOLS = ("ftp", "smb", "jdbc", "git", "github", "sftp", "ssh", "webhdfs", "memory", "local", "HTTP", "data")


def test_only_the_protocols_of_the_docs_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.jsonl"
    chains = (f"reference://r.jsonl::{file}", f"file://{file}::file://{file}", f"simplecache://x::file://{file}")
    templates = ("s3://bucket/{{x}}/r.jsonl", "file:///{% for x in y %}/r.jsonl")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: pytest.fail(f"{url} was opened"))
    for url in (*(f"{name}://127.0.0.1/r.jsonl" for name in OTHER_PROTOCOLS), "data:,a/r.jsonl"):
        for name in (url, url.replace("r.jsonl", "*.jsonl")):
            with pytest.raises(DataError, match=r"has a protocol that is not supported; give a path, or a URL at http"):
                opened(name, tmp_path)
    for url in (*chains, *templates):
        with pytest.raises(DataError, match=r"is a chain or a template of URLs"):
            opened(url, tmp_path)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_the_readme_of_a_data_set_names_files_of_its_own(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"n": 1}\n')
    mark = "---\n" if name == "README.md" else ""
    for pattern in ("reference://r.jsonl::refs.json", "http://127.0.0.1:9/r.jsonl", "file:///etc/r.jsonl", "hf://a::b"):
        (folder / name).write_text(f'{mark}configs: [{{config_name: a, data_files: "{pattern}"}}]\n{mark}')
        with pytest.raises(DataError, match=r"its README names .*, which is neither a file of it nor of the hub"):
            opened(f"{folder}@train", tmp_path)
    (folder / name).write_text(f"{mark}configs: [{{config_name: a, data_files: rows.jsonl}}]\n{mark}")
    assert opened(f"{folder}@train", tmp_path)[0] == {"n": 1}

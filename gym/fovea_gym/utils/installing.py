"""The command that installs a package with an extra, from the package's own source, since no index has it yet."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

GYM = "fovea-rl-gym"
CHECKOUT = Path(__file__).parents[2]


def pip_install(extra: str | None, distribution: str = GYM, checkout: Path = CHECKOUT) -> str:
    """The command that reinstalls a package with an extra: `pip install -e '/src/fovea/gym[hub]'` in a checkout.

    `checkout` is the folder of the package's pyproject.toml, used if the package is only on PYTHONPATH.
    """
    folder, editable = _installed_from(distribution, checkout)
    with_extra = "" if extra is None else f"[{extra}]"
    if folder is None:
        return f"pip install '{distribution}{with_extra}'"
    return f"pip install {'-e ' if editable else ''}'{folder}{with_extra}'"


def _installed_from(distribution: str, checkout: Path) -> tuple[Path | None, bool]:
    """The folder that pip installed a package from, and True if it is editable; None for another origin."""
    try:
        recorded = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # the package is only on PYTHONPATH
        return (checkout, True) if (checkout / "pyproject.toml").is_file() else (None, False)
    origin = json.loads(recorded) if recorded else {}
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file" or "dir_info" not in origin:
        return None, False
    return Path(unquote(url.path)), bool(origin["dir_info"].get("editable"))

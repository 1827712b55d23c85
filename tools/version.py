"""The version of the three packages: that of fovea_gym in a checkout, else that of a source distribution's PKG-INFO."""

import re
from pathlib import Path

_FOLDER = Path(__file__).parent
_GYM = _FOLDER.parent / "gym" / "fovea_gym" / "__init__.py"
_FOUND = (
    re.search(r'__version__ = "(.+)"', _GYM.read_text(encoding="utf-8"))
    if _GYM.is_file()
    else re.search(r"^Version: (.+)$", (_FOLDER / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)
)
assert _FOUND is not None, _FOLDER
__version__ = _FOUND[1]

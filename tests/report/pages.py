"""Written pages, parsed, and texts that try to run as code in them."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ATTACKS = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "'><svg onload=document.title='owned'>",
    "</title></style></script><script>document.title='owned'</script>",
    "<a href=\"javascript:document.title='owned'\">{{ 7 * 7 }}</a>",
)
ATTACK = "".join(ATTACKS)


class Page(HTMLParser):
    """Tags with their attributes, and the blocks of data of a page in one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "script" and (name := attributes.get("id")):
            self.blocks.setdefault(name, data)  # what comes after the end of the block is not its content

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def value(self, path: str) -> Any:
        """What the page gets for a path."""
        return json.loads(self.blocks[f"data/{path}"])

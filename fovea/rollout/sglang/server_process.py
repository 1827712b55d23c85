"""The process that `rollout.sglang.server` starts: `python -m fovea.rollout.sglang.server_process ARGUMENTS`.

The arguments are JSON. The key is in an environment variable, since every user of the machine can list command lines.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from sglang.srt.entrypoints.http_server import app, launch_server
from sglang.srt.server_args import ServerArgs

from fovea.rollout.server import API_KEY_ENV
from fovea.rollout.server_guard import Guard


def main(arguments: dict[str, Any]) -> None:
    """Serve until a signal stops the process."""
    app.add_middleware(Guard)
    launch_server(ServerArgs(**arguments, api_key=os.environ.get(API_KEY_ENV)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

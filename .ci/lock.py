"""Print a lock file, names, versions and hashes, from the report of ``pip install --dry-run --report``."""

import json
import platform
import sys
from pathlib import Path

where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
print(f"# Made by `make lock` for {where}; torch is the CPU build.")  # noqa: T201
found = {}
for package in json.loads(Path(sys.argv[1]).read_text())["install"]:
    hashes = package["download_info"].get("archive_info", {}).get("hashes", {})
    if hashes and package["metadata"]["name"] != "unlazy":
        found[package["metadata"]["name"].lower().replace("_", "-")] = package["metadata"]["version"], hashes["sha256"]
for name, (version, sha256) in sorted(found.items()):
    print(f"{name}=={version} --hash=sha256:{sha256}")  # noqa: T201

"""The wheel for one platform and Python version: with ``KES_COMPILED_WHEEL=1`` it has the compiled leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledLeaves(BuildHookInterface[Any]):
    """Adds the compiled files to the wheel. The places of fields are those of the classes in this environment, so it is
    built where the dependencies are installed, without isolation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing. Raises ``RuntimeError`` if a leaf cannot be compiled."""
        if self.target_name != "wheel" or version == "editable" or os.environ.get("KES_COMPILED_WHEEL") != "1":
            return
        subprocess.run([sys.executable, "-m", "streams.sak.compiling"], cwd=self.root, check=True)
        sys.path.insert(0, self.root)
        from streams.sak import leaves

        for name in leaves.names():
            built = leaves.built_file(leaves.source_of(name))
            if not built.exists():
                raise RuntimeError(f"the wheel was to be a compiled one, and {name} is not compiled")
            build_data["force_include"][str(built)] = str(built.relative_to(Path(self.root)))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

"""Compiles the library when the package is built or installed.

Without a compiler the package installs all the same.
"""

import importlib.util
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface[Any]):
    """Puts the library beside the package's modules."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "src" / "pilotlight" / "native"
        spec = importlib.util.spec_from_file_location(
            "pilotlight_native_building", folder / "building.py"
        )
        assert spec is not None
        assert spec.loader is not None
        building = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(building)
        library = folder / building.library_name()
        try:
            building.compile_library(library)
        except building.CannotCompile as error:
            self.app.display_warning(f"pilotlight-native installs without its library: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"pilotlight/native/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"

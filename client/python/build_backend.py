"""What builds the package (PEP 517): scikit-build-core, given the API's protos compiled.

The sources stay as they are: another environment may run what was compiled for it there.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_protos import HERE, PROTO, compile_protos
from scikit_build_core import build
from scikit_build_core.build import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any]


@contextmanager
def with_protos(settings: Settings | None, kind: str) -> Iterator[Settings]:
    """The settings for a distribution of this kind that has them in its heavywater/v1."""
    with tempfile.TemporaryDirectory() as temporary:
        compiled = HERE  # of a source distribution, which carries them
        if PROTO.exists():
            compiled = Path(temporary)
            compile_protos(compiled)
        yield {**(settings or {}), f"{kind}.force-include.{compiled / 'heavywater/v1'}": "heavywater/v1"}


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    with with_protos(config_settings, "sdist") as settings:
        return build.build_sdist(sdist_directory, settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    with with_protos(config_settings, "wheel") as settings:
        return build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """A wheel that names this folder in a .pth: new files count, and so does the module that CMake puts there.

    Both modes of scikit-build-core hook into imports instead, before PYTHONPATH: another checkout could not be run.
    """
    if not (HERE / "heavywater/v1/__init__.py").exists():
        compile_protos()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "heavywater.pth"
        path.write_text(f"{HERE}\n", encoding="utf-8")
        settings: Settings = {"wheel.cmake": "false", "wheel.packages": [], f"wheel.force-include.{path}": path.name}
        return build.build_wheel(wheel_directory, {**(config_settings or {}), **settings}, metadata_directory)

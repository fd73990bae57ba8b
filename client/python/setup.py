"""Compiles the API's protos into the package that is built."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from compile_protos import HERE, compile_protos


class BuildWithProtos(build_py):
    """The sources stay as they are: another environment may run what was compiled for it there."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            compile_protos(Path(self.build_lib))
        elif not (HERE / "heavywater" / "v1" / "__init__.py").exists():
            compile_protos(HERE)


setup(cmdclass={"build_py": BuildWithProtos})

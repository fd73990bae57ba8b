"""Compiles the API's protos into the package that is built; takes the compiled engine along where it is told to.

HEAVYWATER_ENGINE names the module that CMake has built (heavywater/_engine.*.so): then the wheel carries it, and is one
of its Python and machine (deploy/local/wheel). Without, the wheel has no compiled code and runs anywhere.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from compile_protos import HERE, compile_protos

ENGINE = os.environ.get("HEAVYWATER_ENGINE", "")


class BuildWithProtos(build_py):
    """The sources stay as they are: another environment may run what was compiled for it there."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            compile_protos(Path(self.build_lib))
            if ENGINE:
                shutil.copy2(ENGINE, Path(self.build_lib) / "heavywater")
        elif not (HERE / "heavywater" / "v1" / "__init__.py").exists():
            compile_protos(HERE)


class DistributionOfEngine(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(ENGINE)


setup(cmdclass={"build_py": BuildWithProtos}, distclass=DistributionOfEngine)

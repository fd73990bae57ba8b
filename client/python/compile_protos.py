"""Compiles proto/heavywater/v1 into heavywater/v1, which is not committed.

python compile_protos.py
"""

from importlib import resources
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PROTO = HERE.parents[1] / "proto/heavywater/v1"


def compile_protos(root: Path = HERE) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py into root/heavywater/v1."""
    files = sorted(PROTO.glob("*.proto"))
    out = root / "heavywater" / "v1"
    if not files:
        raise SystemExit(f"no protos in {PROTO}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "__init__.py").touch()
    well_known = resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO.parents[1]}",
            f"-I{well_known}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            *map(str, files),
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with {code}")


if __name__ == "__main__":
    compile_protos()

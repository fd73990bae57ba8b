#!/usr/bin/env python3
"""Lets the torch that PyPI has for x86-64 run on machines without a GPU, without 3 GB of NVIDIA's libraries.

That torch is linked against CUDA, cuDNN and others, and does not load without them, although nothing is called
where there is no GPU. This writes one small library beside torch's that stands for all of them: every function that
they would give says "no CUDA-capable device" (error 100). For tests; a GPU needs torch as its dependencies install it.

    deploy/local/torch_without_cuda.py SITE_PACKAGES      needs gcc and binutils
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STANDS_FOR = re.compile(r"lib(cu|nv|nccl)")  # of libraries
FUNCTION = re.compile(r"_*(cu|nv|nccl|Cu)")  # that they define
OWN = "libno_cuda.so"

# What is called where there is no GPU and is no failure there, too.
BODIES = {
    "cudaStreamIsCapturing": "movl $0, (%rsi)\nxorl %eax, %eax\nret",  # status: none
    "cudaGetErrorString": "leaq message(%rip), %rax\nret",
    "cudaGetErrorName": "leaq message(%rip), %rax\nret",
}
DATA = '.section .rodata\nmessage: .string "no CUDA-capable device: libraries are stand-ins"\n'


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wanted_functions(libraries: list[Path]) -> dict[str, list[str]]:
    """By symbol version ("": none): functions that these libraries need and none of them has."""
    needed: set[str] = set()
    defined: set[str] = set()
    for library in libraries:
        for line in output_of("nm", "-D", str(library)).splitlines():
            kind, name = line.split()[-2:]
            if kind == "U":
                needed.add(name)
            else:
                defined.add(name.split("@")[0])
    wanted = collections.defaultdict(list)
    for symbol in sorted(needed):
        name, _, version = symbol.partition("@")
        if name not in defined and FUNCTION.match(name):
            wanted[version].append(name)
    return wanted


def missing_libraries(libraries: list[Path]) -> list[str]:
    there = {library.name for library in libraries}
    needed: set[str] = set()
    for library in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", str(library))))
    return sorted(name for name in needed - there if STANDS_FOR.match(name))


def compile_stand_in(functions: dict[str, list[str]], out: Path) -> None:
    names = {name for group in functions.values() for name in group}
    plain = sorted(names - BODIES.keys())
    lines = [f".globl {name}\n.type {name}, @function" for name in sorted(names)]
    lines += [f"{name}:\n{body}" for name, body in BODIES.items() if name in names]
    lines += [f"{name}:" for name in plain] + ["movl $100, %eax\nret", DATA]
    assembly = ".text\n" + "\n".join(lines) + '.section .note.GNU-stack, "", @progbits\n'
    versions = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in group)} }};\n"
        for version, group in sorted(functions.items())
        if version
    )
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        script.write(versions)
        script.flush()
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,--version-script={script.name}", "-x", "assembler", "-"]
        subprocess.run([*command, "-o", str(out)], input=assembly, text=True, check=True)


def main() -> None:
    folder = Path(sys.argv[1]) / "torch" / "lib"
    if not folder.is_dir():
        sys.exit(f"error: {folder} is no folder, want site-packages with torch")
    libraries = sorted(path for path in folder.glob("lib*.so*") if not path.is_symlink() and path.name != OWN)
    missing = missing_libraries(libraries)
    if not missing:
        return  # a torch without CUDA
    compile_stand_in(wanted_functions(libraries), folder / OWN)
    for name in missing:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(OWN)


if __name__ == "__main__":
    main()

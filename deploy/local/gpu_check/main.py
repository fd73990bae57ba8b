"""The command: options, order, exit status."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_check.build import BuildError, BuildResult, compile_targets, configure
from gpu_check.check import run_parts
from gpu_check.machine import Gpu, find_gpus
from gpu_check.pack import PackError, make_pack
from gpu_check.parts import TARGETS, parts
from gpu_check.summary import Summary

ROOT = Path(__file__).resolve().parents[3]
PACK = ROOT / "build/gpu-pack"
BUILD = ROOT / "build/gpu-check"

OK, FAILED, NO_GPU = 0, 1, 2
_BUILD_SHARE = 0.6  # of the time that everything has
_DEFAULT_ARCHITECTURE = "90-real"  # to compile where there is no GPU


def main(arguments: list[str], description: str) -> int:
    """Returns the exit status."""
    options = _parse(arguments, description)
    try:
        return _pack() if options.pack else _check(options)
    except (PackError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _parse(arguments: list[str], description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deploy/local/gpu-check", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", action="store_true", help="collect what a build needs, and end")
    parser.add_argument("--build-only", action="store_true", help="compile and link, and end")
    parser.add_argument(
        "--json", type=Path, metavar="DIR", help="where each part's JSON goes [build/gpu-check/results]"
    )
    parser.add_argument("--part", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything, the build included [300]")
    parser.add_argument("--build-dir", type=Path, default=BUILD, metavar="DIR", help="[build/gpu-check]")
    parser.add_argument("--architecture", help="of CMAKE_CUDA_ARCHITECTURES [that of the GPU]")
    options = parser.parse_args(arguments)
    known = [part.name for part in parts()]
    for name in options.part or []:
        if name not in known:
            parser.error(f"--part {name}, want one of: {', '.join(known)}")
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _pack() -> int:
    size = make_pack(PACK)
    _say(f"{PACK.relative_to(ROOT)}: {size / (1 << 20):.1f} MiB; it must travel with the checkout")
    return OK


def _check(options: argparse.Namespace) -> int:
    deadline_s = time.monotonic() + options.seconds
    results = options.json or options.build_dir / "results"
    (results / "logs").mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts() if options.part is None or part.name in options.part]
    summary = Summary(results / "summary.json", [part.name for part in chosen])
    summary.gpus = find_gpus()
    for index, gpu in enumerate(summary.gpus):
        _say(f"GPU {index}: {gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}")
    try:
        summary.build = _build(options, summary.gpus)
    except (BuildError, PackError) as error:
        summary.end(FAILED, str(error))
        raise
    if summary.gpus and not options.build_only:
        run_parts(chosen, options.build_dir, summary.build.built, results, deadline_s, _say, summary.parts_ended)
    elif not options.build_only:
        summary.error = "no GPU: nvidia-smi finds none, so nothing has run"
        _say(summary.error)
    status = _status(options, summary)
    summary.end(status, summary.error)
    _say(f"parts: {summary.counts()}; {summary.file}")
    return status


def _build(options: argparse.Namespace, gpus: list[Gpu]) -> BuildResult:
    architecture = options.architecture or (gpus[0].architecture if gpus else _DEFAULT_ARCHITECTURE)
    source = configure(ROOT, options.build_dir, PACK, architecture)
    built = compile_targets(options.build_dir, TARGETS, source, _BUILD_SHARE * options.seconds)
    _say(f"built {len(built.built)} of {len(TARGETS)} programs for {architecture} in {built.seconds:.0f} s ({source})")
    if built.failed:
        _say(f"  not built: {', '.join(built.failed)} (see {options.build_dir / 'build.log'})")
    return built


def _status(options: argparse.Namespace, summary: Summary) -> int:
    failed = summary.build is None or bool(summary.build.failed)
    if failed or any(result.counts_as_failed for result in summary.ended):
        return FAILED
    return OK if summary.gpus or options.build_only else NO_GPU

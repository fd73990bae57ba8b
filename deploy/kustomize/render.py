"""The chart as plain manifests: one file for each template, and a kustomization of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import helm_python
import yaml

HERE = Path(__file__).resolve().parent
CHART = HERE.parent / "helm/heavywater"
HEADER = "# Rendered from deploy/helm/heavywater by deploy/kustomize/render: change the chart, not this.\n"


def without_helm(text: str) -> str:
    """Labels that would say that Helm manages what it does not."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    kept = [line for line in lines if not line.lstrip().startswith("helm.sh/chart:")]
    return "\n".join(kept).replace("managed-by: Helm", "managed-by: kustomize") + "\n"


def render(values: dict[str, Any], name: str, namespace: str) -> dict[str, str]:
    """File name -> text, kustomization.yaml included."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values, name=name, namespace=namespace)
    files = {}
    for path, text in sorted(rendered.items()):
        if path.endswith(".yaml") and any(yaml.safe_load_all(text)):
            body = without_helm(text)
            files[Path(path).name] = HEADER + (body if body.startswith("---") else "---\n" + body)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": sorted(files),
    }
    files["kustomization.yaml"] = HEADER + "---\n" + yaml.safe_dump(kustomization, sort_keys=False)
    return files


def write(files: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.yaml"):
        if old.name not in files and old.read_text().startswith(HEADER):
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=Path, help="YAML file of values; else the chart's own")
    parser.add_argument("--output", type=Path, default=HERE / "base")
    parser.add_argument("--name", default="heavywater")
    parser.add_argument("--namespace", default="heavywater")
    options = parser.parse_args()
    values = yaml.safe_load(options.values.read_text()) if options.values else {}
    write(render(values or {}, options.name, options.namespace), options.output)
    print(f"{options.output}: kubectl apply -k {options.output}")


if __name__ == "__main__":
    main()

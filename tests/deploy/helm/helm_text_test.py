"""The YAML itself, and the plain manifests that are rendered from the chart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import helm_chart
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

DEPLOY = helm_chart.ROOT / "deploy"
BASE = DEPLOY / "kustomize/base"


def problems(name: str, text: str) -> list[str]:
    rules = YamlLintConfig(file=str(DEPLOY / ".yamllint.yaml"))
    return [f"{name}:{p.line}: {p.desc}" for p in linter.run(text, rules)]


def test_the_charts_own_yaml_is_clean() -> None:
    paths = [
        helm_chart.CHART / "Chart.yaml",
        helm_chart.CHART / "values.yaml",
        *(helm_chart.CHART / "files").glob("*.yaml"),
    ]
    paths += [*BASE.glob("*.yaml"), *(helm_chart.ROOT / "tests/deploy/monitoring").glob("*.yaml")]
    assert len(paths) > 10
    assert [found for path in paths for found in problems(path.name, path.read_text())] == []


@pytest.mark.parametrize("variant", helm_chart.VARIANTS)
def test_what_is_rendered_is_clean(variant: str) -> None:
    texts = helm_chart.render_text(helm_chart.VARIANTS[variant])
    assert [found for name, text in texts.items() for found in problems(name, text.strip() + "\n")] == []


def test_the_linter_is_on() -> None:
    assert problems("a", "a: 1\na: 2\n") and problems("a", "a:  1 \n")


@pytest.fixture
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kustomize_render", DEPLOY / "kustomize/render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kustomize_base_is_up_to_date(renderer: ModuleType) -> None:
    wanted = renderer.render({}, "heavywater", "heavywater")
    found = {path.name: path.read_text() for path in BASE.iterdir()}
    assert found == wanted, "run deploy/kustomize/render"


def test_the_kustomization_lists_every_manifest_and_nothing_of_helm_is_left() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert kustomization["resources"] == sorted({p.name for p in BASE.iterdir()} - {"kustomization.yaml"})
    assert "helm.sh/" not in "".join(path.read_text() for path in BASE.iterdir())


def test_rendering_removes_files_that_the_chart_no_longer_has_and_no_others(
    renderer: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "old.yaml").write_text(renderer.HEADER + "---\n")
    (tmp_path / "mine.yaml").write_text("---\n")
    renderer.write(renderer.render({}, "n", "ns"), tmp_path)
    assert not (tmp_path / "old.yaml").exists()
    assert (tmp_path / "mine.yaml").exists()
    assert yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["namespace"] == "ns"

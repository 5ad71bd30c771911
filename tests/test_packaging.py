"""What a user installs: the wheel holds the package and the demo's weights, and nothing of the workshop."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import routeguard

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, folder: Path, source: Path) -> Path:
    """Build a wheel or sdist in a process of its own, offline."""
    done = subprocess.run([sys.executable, "-c", BUILD, what, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed or would be: a copy, since building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_demos_weights(source: Path, tmp_path: Path) -> None:
    wheel = build("build_wheel", tmp_path, source)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(info).decode())
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"routeguard"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "routeguard").rglob("*.py")}
    assert modules <= set(names) and "routeguard/py.typed" in names
    data = {name for name in names if name.startswith("routeguard/") and not name.endswith((".py", "py.typed"))}
    assert data and all(name.startswith("routeguard/demo/weights/") for name in data), data
    assert any(name.endswith("licenses/LICENSE") for name in names) and any("licenses/NOTICE" in n for n in names)
    assert metadata["Version"] == routeguard.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert wheel.stat().st_size < 3 * 2**20


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", tmp_path, source)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    wheels = [build("build_wheel", first, source), build("build_wheel", second, unpacked)]
    contents = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            contents.append({n: archive.read(n) for n in archive.namelist() if not n.endswith(("RECORD", "METADATA"))})
    assert contents[0] == contents[1]

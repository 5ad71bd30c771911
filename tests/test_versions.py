"""Libraries below the bounds are named before anything is run on them."""

from __future__ import annotations

import importlib.metadata as metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import routeguard
from routeguard.cli.main import app
from routeguard.versions import check_versions
from tests.zoo.build import build

Installed = dict[str, str | None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Versions to pretend, by package; None for one that is not installed."""
    pretended: Installed = {}
    real = metadata.version

    def version(name: str) -> str:
        found = pretended[name] if name in pretended else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    check_versions.cache_clear()
    yield pretended
    check_versions.cache_clear()


def test_what_is_installed_here_is_new_enough(installed: Installed) -> None:
    check_versions()


@pytest.mark.parametrize(
    ("package", "too_old", "oldest"),
    [
        ("transformers", "4.56.2", "4.57.1"),
        ("trl", "0.23.1", "0.24.0"),
        ("peft", "0.17.1", "0.18.0"),
        ("accelerate", "1.9.0", "1.10.0"),
        ("torch", "2.5.1+cu124", "2.6.0+cpu"),
    ],
)
def test_a_package_below_its_bound_is_named_with_the_remedy(
    installed: Installed, package: str, too_old: str, oldest: str
) -> None:
    installed[package] = too_old
    with pytest.raises(ImportError, match=rf"needs {package}>=.*, but found {package} {too_old[:5]}.*pip install"):
        check_versions()
    installed[package] = oldest
    check_versions()


def test_several_are_named_together(installed: Installed) -> None:
    installed |= {"transformers": "4.40.0", "trl": "0.9.6"}
    with pytest.raises(ImportError, match=r"--upgrade '.*transformers>=.*' '.*trl>=|--upgrade '.*trl>=.*' '.*transf"):
        check_versions()


def test_releases_to_come_and_what_is_not_installed_pass(installed: Installed) -> None:
    installed |= {"transformers": "6.0.0.dev0", "trl": None}
    check_versions()


def test_nothing_is_checked_where_nothing_states_the_bounds(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_metadata(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", no_metadata)
    installed["transformers"] = "4.40.0"
    check_versions()


def test_a_name_of_the_package_is_refused_at_its_import(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed["transformers"] = "4.40.0"
    for name in ("RouteGuard", "restore_checkpoint"):
        monkeypatch.delitem(vars(routeguard), name, raising=False)
    with pytest.raises(ImportError, match=r"transformers>=.*but found transformers 4\.40\.0"):
        from routeguard import RouteGuard  # noqa: F401
    from routeguard import restore_checkpoint  # noqa: F401  works on folders, without transformers


def test_commands_that_load_a_model_say_so_without_a_traceback(installed: Installed, tmp_path: Path) -> None:
    build("lfm2").save_pretrained(tmp_path)
    installed["transformers"] = "4.40.0"
    done = CliRunner().invoke(app, ["recall", str(tmp_path), "--lengths", "64"])
    assert done.exit_code == 2
    assert "found transformers 4.40.0" in done.output
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 0


def test_the_check_imports_none_of_them() -> None:
    code = (
        "import routeguard, sys; assert 'importlib.metadata' not in sys.modules;"
        "routeguard.QKRestore; from routeguard.versions import check_versions; check_versions();"
        "bad = {'torch', 'transformers', 'trl', 'peft'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

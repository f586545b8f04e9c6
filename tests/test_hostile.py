"""Malicious inputs: commands refuse them with an error that names the input, and leave no file behind."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.cli import main
from pipeline.data import LIMIT_BYTES
from tests.test_parsers import bounded, picture

Files = dict[str, bytes]


def params(**sections: Any) -> bytes:
    return yaml.safe_dump({"variants": {"baseline": {}}} | sections).encode()


def variant(name: str) -> dict[str, Any]:
    return {"variants": {"baseline": {}, name: {}}}


def array(inputs: bytes) -> Files:
    """Return the files of a job on the array ``inputs``, after ``fetch``."""
    listing = f"path,size_bytes,sha256\ninputs.npy,{len(inputs)},{hashlib.sha256(inputs).hexdigest()}\n"
    return {"params.yaml": params(fetch={"dataset": "arrays", "arrays": "own"}),
            "own/inputs.npy": inputs, "data/raw/arrays/files.csv": listing.encode()}  # fmt: skip


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def header(text: str) -> bytes:
    """Return an .npy file with this header and no data."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def shaped(shape: str, kind: str = "|u1") -> bytes:
    return header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n")


def folder(**files: bytes) -> Files:
    config = params(fetch={"dataset": "image_folder", "image_folder": "pictures"},
                    prepare={"image_size": [8, 8], "workers": 1})  # fmt: skip
    return {"params.yaml": config} | {f"pictures/train/{name}": content for name, content in files.items()}


def png(width: int, height: int, bits: int = 1) -> bytes:
    """Return a black PNG of ``width`` x ``height`` pixels with ``bits`` bits each, compressed to few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + (width * bits + 7) // 8)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def pictures(name: str, content: bytes) -> Files:
    return folder(**{"one/good.png": picture("PNG"), f"one/{name}": content})


PIXELS = LIMIT_BYTES // 4
BASELINE = b"variants: {baseline: {}}\n"
OPTIONS = BASELINE.decode() + "train:\n  model_options:\n"
LAUGHS = f"{OPTIONS}    a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 20)
)
MERGED = f"{OPTIONS}    m0: &m0 {{x: 1}}\n" + "".join(
    f"    m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 10)}]}}\n" for level in range(1, 20)
)
CODE = b"cos\nsystem\n(S'touch owned'\ntR."
ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("commands", "files", "named"),
    [
        ("environment", {"params.yaml": LAUGHS.encode()}, "10,000 values"),
        ("environment", {"params.yaml": MERGED.encode()}, "10,000 values"),
        ("environment", {"params.yaml": BASELINE + b"train:\n  model_options: &a {x: *a}\n"}, "10,000 values"),
        ("environment", {"params.yaml": b"- x\n" * 20_000}, "10,000 values"),
        ("environment", {"params.yaml": b"train: " + b"[" * 5_000}, "is not YAML"),
        ("environment", {"params.yaml": b"x" * 300_000}, "more than 262,144 characters"),
        ("environment", {"params.yaml": BASELINE + b"train: {epochs: 0x" + b"f" * 5_000 + b"}"}, "2,000 characters"),
        ("environment", {"params.yaml": BASELINE + b"train: {epochs: " + b"9" * 1_500 + b"}"}, "epochs: found 999"),
        ("environment", {"params.yaml": params(**variant("x" * 300))}, "at most 100 characters"),
        ("environment", {"params.yaml": params(**variant("x; touch owned"))}, "variants.x; touch owned: found"),
        ("environment", {"params.yaml": params(**{ESCAPE: 1})}, r"\x1b]0;owned\x07: unknown key"),
        ("environment", {"params.yaml": params(**{"x\n::error::y\n##[z]": 1})}, "\n\\::error::y\n##\\[z]: unknown key"),
        ("environment", {"params.yaml": params(train={"seeds": [2**32]})}, "train.seeds.0: found 4294967296"),
        ("environment", {"params.yaml": params(train={"epochs": 10**30})}, "train.epochs: found 1000"),
        ("environment", {"params.yaml": params(fetch={"timeout_seconds": 1e300})}, "timeout_seconds: found 1e+300"),
        ("environment", {"params.yaml": params(prepare={"image_size": [10**6, 8]})}, "prepare.image_size.0: found"),
        ("prepare", array(shaped("(2147483647, 8, 8)")), "own/inputs.npy cannot be read (mmap length is greater"),
        ("prepare", array(shaped(f"({2**62}, 8, 8)")), "own/inputs.npy cannot be read"),
        ("prepare", array(shaped(f"({2**70}, 8, 8)")), "own/inputs.npy cannot be read"),
        ("prepare", array(shaped("(-1, 8, 8)")), "expected numbers in rows of one shape"),
        ("prepare", array(shaped("()")), "expected numbers in rows of one shape"),
        ("prepare", array(shaped("(3, 8, 8)", "|O")), "expected numbers in rows of one shape"),
        ("prepare", array(header("(" * 9_000)), "own/inputs.npy cannot be read"),
        ("prepare", array(header("-" * 9_000 + "1")), "own/inputs.npy cannot be read"),
        ("prepare", array(CODE), "own/inputs.npy cannot be read"),
        (
            "prepare",
            {"params.yaml": params(fetch={"dataset": "cifar10"}), "data/raw/cifar10/data_batch_1": CODE},
            "data_batch_1: SHA-256 is",
        ),
        (
            "prepare",
            {"params.yaml": params(fetch={"dataset": "mnist"}), "data/raw/mnist/train-images-idx3-ubyte": CODE},
            "train-images-idx3-ubyte: SHA-256 is",
        ),
        ("fetch", folder(**{f"{ESCAPE}/1.png": picture("PNG")}), r"class '\x1b]0;owned\x07' of"),
        ("fetch", folder(**{"\n::error::/1.png": picture("PNG")}), r"class '\n::error::' of"),
        ("fetch", folder(**{"\udcff/1.png": picture("PNG")}), r"class '\udcff' of"),
        ("fetch prepare", pictures("eps.png", picture("EPS")), "cannot identify image file"),
        ("fetch prepare", pictures("icon.png", picture("ICO")), "cannot identify image file"),
        ("fetch prepare", pictures("bomb.png", png(PIXELS // 2**13 + 1, 2**13)), "decompression bomb"),
        ("fetch prepare", pictures("larger.png", png(2**15, 2**15)), "decompression bomb"),
        ("fetch prepare", pictures("lies.ppm", b"P6 2000000000 2000000000 255\n"), "decompression bomb"),
        ("fetch prepare", pictures(f"{ESCAPE}\n::error::x.png", b""), "\\x1b]0;owned\\x07\n\\::error::x.png: broken"),
    ],
)  # fmt: skip
def test_a_hostile_input_is_named_and_leaves_no_file(
    commands: str, files: Files, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """All commands but the last succeed."""
    monkeypatch.chdir(tmp_path)
    write(files)
    *earlier, last = commands.split()
    assert not any(main([each]) for each in earlier)
    before = there()
    assert main([last]) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert named in said
    assert "\x1b" not in said
    assert "Traceback" not in said
    assert there() == before


def test_a_swapped_file_of_any_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    swapped = "data/raw/mnist/train-images-idx3-ubyte"
    write({"params.yaml": params(fetch={"dataset": "mnist"}), swapped: b""})
    os.truncate(swapped, 1 << 40)  # zeros that take no space on disk
    assert main(["prepare"]) == 2
    assert f"{Path(swapped).name}: SHA-256 is" in capsys.readouterr().err


def there() -> set[Path]:
    return {path for path in Path().rglob("*") if path.is_file()}


def write(files: Files) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


@pytest.mark.slow
def test_a_picture_that_is_as_large_as_allowed_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit has room for the decoded pixels and for their copy during the conversion."""
    monkeypatch.chdir(tmp_path)
    large = png(2**13, PIXELS // 2**13, bits=8)
    write(pictures("large.png", large) | folder(**{"two/small.png": picture("PNG")}))
    assert main(["fetch"]) == 0
    with bounded():
        assert main(["prepare"]) == 0


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_the_formats_allowed_in_an_image_folder_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
    write(folder(**{f"{label}/{index}.{suffix}": picture(kind) for label in ("one", "two") for index in range(2)}))
    assert main(["fetch"]) == 0
    assert main(["prepare"]) == 0

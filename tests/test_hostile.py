"""Malicious inputs: commands refuse them with an error that names the input, and leave no file behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet

from pipeline import environment, results
from pipeline.cli import main
from pipeline.comparison import consistency
from pipeline.data import LIMIT_BYTES, array_files, prepared, text
from pipeline.data.decoded import listed
from pipeline.errors import PipelineError, redacted, said, say, spelled
from pipeline.models import from_config
from pipeline.models.from_config import FromConfig
from pipeline.params import load
from pipeline.tools import evidence
from pipeline.tracking import comparisons, promoting
from tests.commands import bounded
from tests.factories import picture, saved

Files = dict[str, bytes]


def params(**sections: Any) -> bytes:
    return yaml.safe_dump({"variants": {"baseline": {}}} | sections).encode()


def variant(name: str) -> dict[str, Any]:
    return {"variants": {"baseline": {}, name: {}}}


def array(inputs: bytes, name: str = "inputs.npy") -> Files:
    """Return the files of a job on the array ``inputs``, or on the arrays in the file ``name``, after ``fetch``."""
    listing = f"path,size_bytes,sha256\n{name},{len(inputs)},{hashlib.sha256(inputs).hexdigest()}\n"
    place = "own" if name == "inputs.npy" else f"own/{name}"
    return {"params.yaml": params(fetch={"dataset": "arrays", "arrays": place}),
            f"own/{name}": inputs, "data/raw/arrays/files.csv": listing.encode()}  # fmt: skip


def zipped(method: int, claimed: int) -> bytes:
    """Return an .npz file whose array is compressed by ``method``, and claims to unpack to ``claimed`` bytes."""
    content = npy(np.zeros((1000, 8)))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("inputs.npy", content)
    return out.getvalue().replace(struct.pack("<I", len(content)), struct.pack("<I", claimed))


def sparse(shape: str) -> bytes:
    """Return a safetensors file without data."""
    head = f'{{"inputs": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 0]}}}}'.encode()
    return struct.pack("<Q", len(head)) + head


def rows(count: int) -> bytes:
    """Return a Parquet table of ``count`` equal rows, which takes few bytes."""
    column = pyarrow.array(np.zeros(count, np.uint8))
    return saved(lambda out: parquet.write_table(pyarrow.table({"x": column}), out))


def datasets_folder(**state: Any) -> Files:
    """Return the files of a job on a data set that the library datasets saved."""
    files = {"params.yaml": params(fetch={"dataset": "arrays", "arrays": "own"})}
    return files | {"own/state.json": json.dumps(state).encode(), "outside.arrow": b"x"}


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
CODE = b"cos\nsystem\n(S'touch owned'\ntR."
ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("commands", "files", "named"),
    [
        ("environment", {"params.yaml": b"train: " + b"[" * 5_000}, "is not YAML"),
        ("environment", {"params.yaml": b"x" * 300_000}, "has 300,000 bytes; allowed: 262,144"),
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
        ("environment", {"params.yaml": BASELINE + b"train: {<<: {epochs: 2}, <<: {}}\n"}, "'<<' occurs twice"),
        ("environment", {"params.yaml": b"\0" * 10}, "params.yaml is not YAML"),
        ("prepare", array(zipped(zipfile.ZIP_BZIP2, 8_128), "own.npz"), "compressed by another method than numpy's"),
        ("prepare", array(zipped(zipfile.ZIP_LZMA, 2**31), "own.npz"), "compressed by another method than numpy's"),
        ("prepare", array(zipped(zipfile.ZIP_DEFLATED, 2**31), "own.npz"), "unpack to 2,147,483,648; allowed: 1,073,"),
        ("prepare", array(rows(40_000_000), "own.parquet"), "allowed: 1,073,741,824. If the file is yours"),
        ("prepare", array(sparse(f"[{10**15}, 0]"), "own.safetensors"), "allowed: 1,073,741,824. If the file is yours"),
        ("fetch", datasets_folder(_data_files=[{"filename": "../outside.arrow"}]), "'../outside.arrow' is in another"),
        ("fetch", datasets_folder(_data_files=[{"filename": "/outside.arrow"}]), "'/outside.arrow' is in another f"),
        ("fetch", datasets_folder(_data_files=7), "own cannot be read"),
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
@pytest.mark.usefixtures("here")
def test_a_hostile_input_is_named_and_leaves_no_file(
    commands: str, files: Files, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands but the last succeed."""
    write(files)
    *earlier, last = commands.split()
    assert not any(main([command]) for command in earlier)
    before = files_present()
    assert main([last]) == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert named in said
    assert "\x1b" not in said
    assert "Traceback" not in said
    assert files_present() == before


@pytest.mark.usefixtures("here")
def test_a_compressed_data_set_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(array_files, "LIMIT_UNPACKED_BYTES", 1 << 26)
    names = ["inputs", *(f"more{number}" for number in range(40))]  # beyond what pyarrow reserves in advance
    batch = pyarrow.record_batch(dict.fromkeys(names, pyarrow.array(np.zeros(1 << 26, np.uint8))))
    for codec, code in ((None, 0), ("zstd", 2)):
        options = pyarrow.ipc.IpcWriteOptions(compression=codec)
        rows = batch if codec else batch.select(["inputs"])[:8]
        out = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(out, rows.schema, options=options) as stream:
            stream.write_batch(rows)
        state = dict.fromkeys(("_fingerprint", "_format_columns", "_format_type", "_output_all_columns"))
        state |= {"_data_files": [{"filename": "data.arrow"}], "_format_kwargs": {}, "_split": None}
        info = {"features": {key: {"dtype": "uint8", "_type": "Value"} for key in rows.schema.names}}
        written = {"data.arrow": out.getvalue(), "dataset_info.json": json.dumps(info).encode()}
        write(datasets_folder(**state) | {f"own/{name}": content for name, content in written.items()})
        before = pyarrow.total_allocated_bytes()
        assert main(["fetch"]) == code, capsys.readouterr()
        assert pyarrow.total_allocated_bytes() - before < 1 << 27
    said = capsys.readouterr().err
    assert "fetch.arrays: " in said
    assert "bytes unpack to more memory than is allowed: 67,108,864" in said


@pytest.mark.usefixtures("here")
def test_a_swapped_file_of_any_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    swapped = "data/raw/mnist/train-images-idx3-ubyte"
    write({"params.yaml": params(fetch={"dataset": "mnist"}), swapped: b""})
    os.truncate(swapped, 1 << 40)  # zeros that take no space on disk
    assert main(["prepare"]) == 2
    assert f"{Path(swapped).name}: SHA-256 is" in capsys.readouterr().err


def files_present() -> set[Path]:
    return {path for path in Path().rglob("*") if path.is_file()}


def write(files: Files) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_largest_picture_takes_bounded_memory() -> None:
    """The limit has room for the decoded pixels and for their copy during the conversion."""
    large = png(2**13, PIXELS // 2**13, bits=8)
    write(pictures("large.png", large) | folder(**{"two/small.png": picture("PNG")}))
    assert main(["fetch"]) == 0
    with bounded():
        assert main(["prepare"]) == 0


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
@pytest.mark.usefixtures("here")
def test_allowed_formats_of_images_are_read(kind: str) -> None:
    suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
    write(folder(**{f"{label}/{index}.{suffix}": picture(kind) for label in ("one", "two") for index in range(2)}))
    assert main(["fetch"]) == 0
    assert main(["prepare"]) == 0


# Tokenizers


def tokenizer(model: Any = None, normalizer: Any = None, splitter: Any = None, **vocab: int) -> bytes:
    model = model or {"type": "WordLevel", "vocab": vocab or {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": splitter, "model": model,
         "truncation": None, "padding": None, "post_processor": None, "decoder": None}
    ).encode()  # fmt: skip


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
BACKTRACKS = {
    "type": "Split",
    "pattern": {"Regex": r"(a*)(a*)(a*)(a*)\1\2x?(?!a)(?<!a)"},
    "behavior": "Isolated",
    "invert": False,
}


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (tokenizer(normalizer={"type": "Sequence", "normalizers": [TENFOLD] * 9}), "took more than 256 MiB of memory"),
        (tokenizer(splitter=BACKTRACKS), "it took longer than 1 s"),
        (tokenizer(splitter={"type": "FixedLength", "length": 0}), "the text (chunk size must be non-zero"),
        (tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "not a tokenizer's file ("),
        (tokenizer(a=2**32), "is not a tokenizer's file (Cannot instantiate"),
        (tokenizer(a=2**32 - 1), "a token has the number 4,294,967,295; allowed: less than 4,294,967,295"),
        (tokenizer(b=0), "cannot encode the text (WordLevel error: Missing [UNK] token"),
        (tokenizer({"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]], "byte_fallback": False}), "`unk_id` is"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_a_hostile_tokenizer_is_named(
    file: bytes, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "LIMIT_MEMORY_BYTES", 1 << 28)
    if named.startswith("it took longer"):
        monkeypatch.setattr(text, "LIMIT_SECONDS", 1)
    lines = (b"a" * 100 + b"\n") * 20
    config = params(fetch={"dataset": "text_folder", "text_folder": "own"}, prepare={"tokenizer": "t.json"})
    write({"params.yaml": config, "t.json": file, "own/1.txt": lines, "own/2.txt": lines})
    assert main(["fetch"]) == 0
    before = files_present()
    with bounded():
        assert main(["prepare"]) == 2
    error = capsys.readouterr().err
    assert "prepare.tokenizer: t.json " in error
    assert named in error
    assert "Traceback" not in error
    assert files_present() == before


# Configurations of transformers

LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8,
         "num_attention_heads": 2}  # fmt: skip


def test_a_harmless_configuration_is_taken() -> None:
    harmless = {"vocab_size_per_layer_input": 262_144, "id2label": {"0": "n/a"}, "attn_implementation": "sdpa"}
    assert from_config._checked(LLAMA | harmless) == LLAMA | harmless


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers: found 10000000; allowed: at most 1,000"),
        ({"num_hidden_layers": 900}, "more than 100 modules"),
        ({"hidden_size": 2**30, "head_dim": 4}, "bytes, but this machine has"),
        ({"attn_implementation": "owner/kernel"}, "attn_implementation: found 'owner/kernel', which may name code"),
        ({"_attn_implementation_internal": "owner/kernel:f"}, "_attn_implementation_internal: found 'owner/kernel:f'"),
        ({"attn_implementation": {"": "owner/kernel"}}, "attn_implementation: found 'owner/kernel'"),
        ({"attn_implementation": "flash_attention_2"}, "allowed: eager, sdpa, flex_attention"),
        ({"experts_implementation": "owner/kernel"}, "experts_implementation: found 'owner/kernel'"),
        ({"text_config": {"attn_implementation": "owner/kernel"}}, "attn_implementation: found 'owner/kernel'"),
        ({"hidden_act": "owner/kernel"}, "hidden_act: found 'owner/kernel', which may name code on a hub"),
        ({"x" * 2**20: 1}, "allowed: 1,048,576"),
    ],
)
def test_a_hostile_configuration_of_a_model_is_named(
    changes: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_config.load()
    monkeypatch.setattr(from_config, "LIMIT_MODULES", 100)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with bounded(), pytest.raises(PipelineError) as caught:
        FromConfig(vocabulary=9, length=4, config=str(tmp_path / "config.json"))
    assert named in str(caught.value)


def test_a_configuration_is_built_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    configurations, models = from_config.load()
    offline: list[bool] = []

    class Noticing:
        @staticmethod
        def from_config(*given: Any, **options: Any) -> Any:
            offline.append(constants.is_offline_mode())
            return models.from_config(*given, **options)

    monkeypatch.setattr(from_config, "load", lambda *_: (configurations, Noticing))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    weights = []
    for more in ({}, {"auto_map": {"AutoModelForCausalLM": "owner/code--x.Y"}, "_name_or_path": "owner/model"}):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
        torch.manual_seed(0)
        weights.append(FromConfig(vocabulary=9, length=4, config=str(tmp_path / "config.json")).state_dict())
    assert offline == [True] * 4
    assert constants.HF_HUB_OFFLINE is False
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# Files that are no regular files, or too large, or nested deeply


def piped(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folded(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # zeros that take no space on disk


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


READERS: dict[str, Callable[[Path], object]] = {
    "params.yaml": load,
    "environment.json": environment.read,
    "results/ddp.json": lambda file: results.read_values(file, "ddp"),
    "results/ddp/history.csv": results.read_history,
    "bench.json": results.read_bench,
    "dvc.lock": consistency._recorded,
    "dataset.json": lambda file: prepared.described(file.parent),
    "reports/gate.json": lambda _: promoting._passed(Path(), "commit"),
    "reports/comparison.json": lambda _: comparisons.read_comparison(Path()),
    "evidence.zip": evidence.check,
    "files.csv": listed,
}


@pytest.mark.parametrize(
    ("file", "put"),
    [(file, put) for file in READERS for put in (piped, a_device, folded, large, nested)
     if not (file.endswith(".csv") and put in (large, nested))],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_an_irregular_record_is_named(file: str, put: Callable[[Path], None]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    put(Path(file))
    with bounded(), pytest.raises((PipelineError, OSError)) as caught:
        READERS[file](Path(file))
    assert file in str(said(caught.value))


@pytest.mark.parametrize("put", [piped, a_device, folded, large, nested])
@pytest.mark.usefixtures("job")
def test_an_irregular_session_is_not_used(put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    Path("sessions").mkdir(exist_ok=True)
    put(Path("sessions/\x1b]0;owned\x07.json"))
    with bounded():
        assert main(["compare"]) == 0
    shown = capsys.readouterr().out
    assert r"session not used: sessions/\x1b]0;owned\x07.json" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("speed", [1e-300, 1e-12, 1e300])
@pytest.mark.usefixtures("job")
def test_an_impossible_session_is_not_used(speed: float, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(Path("bench.json").read_text())
    values["session"] |= {"start_utc": "2026-11-01T08:00:00+00:00", "end_utc": None, "boot_id": "another"}
    for sample in (sample for arm in values["arms"] for sample in arm["samples"]):
        sample["samples_per_second"] = (sample["samples_per_second"] or 1000) * speed / 1000
    Path("sessions").mkdir(exist_ok=True)
    Path("sessions/x.json").write_text(json.dumps(values))
    assert main(["compare"]) == 0
    assert "session not used: sessions/x.json" in capsys.readouterr().out


# Text that changes what a terminal or a page shows

UNSEEN = "".join(chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cf"))


def test_no_control_or_format_character_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{UNSEEN} naïve 汉字 \ud800")
    assert capsys.readouterr().out.replace("\n", "").replace("\t", "").isprintable()
    assert spelled("\u202e\U000e0041\ufeff é") == r"\u202e\U000e0041\ufeff é"


@pytest.mark.usefixtures("job")
def test_no_format_character_reaches_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    files = ("results/baseline.json", "results/ddp.json", "bench.json")
    for file in files:
        content = Path(file).read_text()
        device = json.loads(content).get("device") or json.loads(content)["arms"][0]["device"]
        assert f'"device": "{device}"' in content
        Path(file).write_text(content.replace(f'"device": "{device}"', '"device": "\u202e\U000e0041\ufeff\\u001b[2J"'))
    Path("dvc.lock").unlink()
    assert main(["compare"]) == 0
    capsys.readouterr()
    shown = {path: path.read_text() for path in Path("reports").rglob("*") if path.is_file()}
    assert any(r"\u202e" in page for path, page in shown.items() if path.suffix == ".md")
    for path, page in shown.items():
        assert not set(UNSEEN.replace("\n", "")) & set(page), path


@pytest.mark.usefixtures("job")
def test_plan_escapes_a_model_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    write({"params.yaml": params(train={"model": f"nets:{ESCAPE}\u202e"}), "nets.py": b"def net(**_): pass"})
    shutil.rmtree("data")  # then the training is not set up
    main(["plan", "baseline"])
    shown = "".join(capsys.readouterr())
    assert r"\x1b]0;owned\x07\u202e" in shown
    assert not set("\x1b\u202e") & set(shown)


# Secrets in addresses


@pytest.mark.parametrize(
    ("shown", "hidden"),
    [
        ("https://user:pa/ss@h/x", "https://***@h/x"),
        ("'https://u:p'w@h', next", "'https://***@h', next"),
        ("https://u:p'w/x?y@h z", "https://***@h z"),
        ("https://h/x;token=abc", "https://h/x;***"),
        ("https://h/x; then", "https://h/x; then"),
        ("https://h/x?sig='a'b z", "https://h/x?*** z"),
        ('see https://h/x?sig="ab" z', "see https://h/x?*** z"),
        ('{"u": "https://h?sig=abc=",', '{"u": "https://h?***",'),
        ("PIPELINE_IMAGE=user:pass@registry/x", "PIPELINE_IMAGE=***@registry/x"),
        ("u:p'w@h", "***@h"),
        ("registry:5000/x@sha256:ab", "registry:5000/x@sha256:ab"),
        ("user:pass@registry/x@sha256:ab", "***@registry/x@sha256:ab"),
        ("dvc.yaml:train@baseline", "dvc.yaml:train@baseline"),
        ("https://github.com/a/b@v4", "https://github.com/a/b@v4"),
        ("me@work.org, token@host", "me@work.org, token@host"),
        ("mlflow at http://mlflow:5000 is down", "mlflow at http://mlflow:5000 is down"),
        ("https://me:p@ss:word@host", "https://***@host"),
        ("postgresql+psycopg2://me:pw@db:5432/mlflow", "postgresql+psycopg2://***@db:5432/mlflow"),
        ("found 'https://host/x?sig=1&se=2'; expected", "found 'https://host/x?***'; expected"),
        ("https://host/x#access_token=1", "https://host/x#***"),
        ("http://host/#/experiments/1/runs?x=y", "http://host/#/experiments/1/runs?x=y"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("git@github.com:owner/name.git", "git@github.com:owner/name.git"),
    ],
)
def test_no_form_of_an_address_shows_its_secret(shown: str, hidden: str) -> None:
    assert redacted(shown) == hidden


@pytest.mark.parametrize("part", ["://", "://a:'b", ";a", "a://b;", "'a", "a:b@", '="x', "@sha1:", "x"])
def test_a_long_text_is_redacted_in_seconds(part: str) -> None:
    with bounded():
        redacted(part * (2**18 // len(part)))


# Links that lead out of the repository


@pytest.mark.parametrize(
    ("link", "target", "named"),
    [
        (".ci", "../outside", ".ci/gpu leads to"),
        (".github", "../outside", ".github/report.py leads to"),
        (".ci/gpu", "../../outside/gpu", ".ci/gpu leads to"),
        (".dvc", "../outside", ".dvc/config leads to"),
        (".ci", ".git/hooks", ".ci/gpu leads to"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_init_writes_nothing_outside_the_work_tree(
    link: str, target: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(link).parent.mkdir(parents=True, exist_ok=True)
    Path(link).symlink_to(target)
    before = {*Path("..").rglob("*")}
    assert main(["init", "--yes"]) == 2
    assert named in capsys.readouterr().err
    assert {*Path("..").rglob("*")} == before


@pytest.mark.usefixtures("repository")
def test_init_follows_a_link_inside_the_work_tree() -> None:
    Path("tools").mkdir()
    Path(".ci").symlink_to("tools")
    assert main(["init"]) == 0
    assert os.access("tools/gpu", os.X_OK)

"""Files made to do harm: pickles that run code, and archives and numbers that become more than memory holds."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

BEGIN, END = b"\x80\x02", b"."


class Touches:
    """An object whose state, when it is set, makes a file."""

    def __setstate__(self, trace: str) -> None:
        Path(trace).touch()


def text(words: str) -> bytes:
    """The instruction that makes a text."""
    data = words.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """The instruction that makes a number."""
    data = value.to_bytes(9, "little")
    return b"\x8a\x09" + data


def named(module: str, name: str) -> bytes:
    """The instruction that finds something by name."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """The instructions of a call by name; each argument is instructions."""
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def running(trace: Path) -> dict[str, bytes]:
    """Pickles that make the file `trace` when Python's own unpickler reads them, by each way that it has."""
    code = f"open({str(trace)!r}, 'w').close()"
    executed, path = call("builtins", "exec", text(code)), call("pathlib", "PosixPath", text(str(trace)))
    inner = io.BytesIO(torch_file(BEGIN + executed + END)).getvalue()
    nested = b"B" + struct.pack("<I", len(inner)) + inner
    rebuilt = call("torch._tensor", "_rebuild_from_type_v2", named("builtins", "exec"),
                   named("types", "NoneType"), b"(" + text(code) + b"t", b"N")  # fmt: skip
    return {
        "a call by name": BEGIN + executed + END,
        "a call of the system": BEGIN + call("posix", "system", text(f"touch {trace}")) + END,
        "a dotted name from the stack": b"\x80\x04" + text("pathlib") + text("Path.touch") + b"\x93(" + path + b"tR.",
        "an instance by INST": BEGIN + b"(" + text(code) + b"ibuiltins\nexec\n.",
        "an instance by OBJ": BEGIN + b"(" + named("builtins", "exec") + text(code) + b"o.",
        "a state that is set": BEGIN + named("tests.untrusted.harm", "Touches") + b")\x81" + text(str(trace)) + b"b.",
        "a call before a whole value": BEGIN + executed + b"0" + b"}.",
        "a call in a state": BEGIN + named("collections", "OrderedDict") + b")R}" + text("x") + executed + b"sb.",
        "a call as an argument": BEGIN + call("collections", "OrderedDict", b"]" + executed + b"0") + END,
        "a file of torch within": BEGIN + call("torch.storage", "_load_from_bytes", nested) + END,
        "a call through torch": BEGIN + rebuilt + END,
    }


def torch_file(pickled: bytes, records: dict[str, bytes] | None = None, *, packed: bool = False) -> bytes:
    """A file as `torch.save` lays it out, with any pickle and any records."""
    made = io.BytesIO()
    form = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", form, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in {"byteorder": b"little", "version": b"3\n", **(records or {})}.items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


def stored_tensor(count: int, *, claimed: int | None = None) -> tuple[bytes, bytes]:
    """The instructions of a float32 tensor of so many numbers, of which its storage is said to have `claimed`."""
    storage = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu")
    storage += number(count if claimed is None else claimed) + b"tQ"
    size = b"(" + number(count) + b"t(" + number(1) + b"t"
    arguments = (storage, number(0), size, b"\x89", call("collections", "OrderedDict"))
    return call("torch._utils", "_rebuild_tensor_v2", *arguments), b"\0" * 4 * count


@functools.cache
def packed_tensor(count: int) -> bytes:
    """A tensor of zeros in a thousandth of its bytes."""
    pickled, data = stored_tensor(count)
    return torch_file(BEGIN + pickled + END, {"data/0": data}, packed=True)


def growing(wrap: Callable[[bytes], bytes] = lambda made: made) -> dict[str, bytes]:
    """Files of a few bytes that weights-only loading makes gigabytes of, or never ends with."""
    huge = number(2**36)
    hexed = text("a")
    for _ in range(40):
        hexed = call("_codecs", "encode", hexed, text("hex"))
    twice = b"("
    for at in range(60):  # a tuple of twice the one before, whose hash looks at each of them
        twice += (b"(K\x01t" if not at else b"") + b"q" + bytes([at]) + b"h" + bytes([at]) + b"\x86"
    keys = b"}" + twice[1:] + b"K\x01s"
    again = b"q\x01" + b"]" + (named("_codecs", "encode") + b"(h\x01" + text("latin1") + b"tRa") * 20_000
    copied = b"](" + b"".join(b"M" + struct.pack("<H", at) for at in range(2**15)) + b"eq\x01"
    copied += b"]" + (named("builtins", "set") + b"h\x01\x85Ra") * 2000
    plain = {
        "a text that is copied": text("x" * 10**6) + again,
        "a set that is copied": copied,
        "an array of bytes": call("builtins", "bytearray", huge),
        "an array of a tensor": call("builtins", "bytearray", stored_tensor(1)[0]),
        "a tensor of a size": call("torch", "FloatTensor", huge),
        "another tensor of a size": call("torch", "Tensor", huge),
        "a storage of a size": call("torch.storage", "UntypedStorage", huge),
        "a call of a call": call("torch._tensor", "_rebuild_from_type_v2", named("builtins", "bytearray"),
                                 named("builtins", "bytearray"), b"(" + huge + b"t", b"N"),
        "a text that doubles": hexed,
        "a key that doubles": keys,
    }  # fmt: skip
    made = {name: torch_file(BEGIN + pickled + END, {"data/0": bytes(4)}) for name, pickled in plain.items()}
    pickled, data = stored_tensor(4, claimed=2**36)
    made["a storage past its record"] = torch_file(BEGIN + pickled + END, {"data/0": data})
    made["a packed archive"] = packed_tensor(2**26)
    return {name: wrap(content) for name, content in made.items()}

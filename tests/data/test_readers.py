"""IDX and CIFAR files: damage is seen and named, and hostile pickles run nothing."""

from __future__ import annotations

import gzip
import pickle
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from published import Raw, idx, idx_gz, opcodes, pickled
from unlazy import InputError
from unlazy.data import cifar
from unlazy.data.idx import read_idx

HERE = Path("here")


# --- IDX -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 3), (4, 5, 2), (1, 1, 1)])
def test_an_idx_file_is_read_back(shape):
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = read_idx(idx_gz(array), HERE, axes=len(shape))
    assert found.dtype == np.uint8
    assert found.flags.writeable
    np.testing.assert_array_equal(found, array)


ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (b"", "begins with nothing, expected 00000803"),
        (b"\0\0", "begins with 0000, expected 00000803"),
        (idx(ARRAY[0]), "begins with 00000802, expected 00000803"),
        (b"\0\0\x0d\x03" + idx(ARRAY)[4:], "begins with 00000d03, expected 00000803"),
        (idx(ARRAY)[:10], "ends inside its header"),
        (idx(ARRAY)[:-1], r"24 values for its shape \(2, 3, 4\), found 23"),
        (idx(ARRAY) + b"x", r"24 values for its shape \(2, 3, 4\), found 25"),
    ],
)
def test_a_wrong_idx_file_is_named_with_what_was_expected_and_found(plain, said):
    with pytest.raises(InputError, match=f"^here .*{said}"):
        read_idx(gzip.compress(plain), HERE, axes=3)


def test_an_idx_file_that_is_not_gzip_is_named():
    with pytest.raises(InputError, match="here is not a whole gzip file"):
        read_idx(idx(ARRAY), HERE, axes=3)


def test_every_cut_of_an_idx_file_is_seen():
    whole = idx_gz(ARRAY)
    for length in range(len(whole)):
        with pytest.raises(InputError, match=r"^here "):
            read_idx(whole[:length], HERE, axes=3)


def test_no_changed_bit_of_an_idx_file_changes_the_array_unseen():
    whole, refused = idx_gz(ARRAY), 0
    for position in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            try:
                np.testing.assert_array_equal(read_idx(bytes(changed), HERE, axes=3), ARRAY)
            except InputError:
                refused += 1
    assert refused > 8 * (len(whole) - 10)  # all but a few bits of the ten bytes of gzip's header matter


# --- pickles ---------------------------------------------------------------------------------------


def batch(**changes: object) -> dict[bytes, object]:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3072), np.uint8)
    return {b"data": pixels, b"labels": [3, 250]} | {key.encode(): value for key, value in changes.items()}


def test_a_batch_is_read_as_pickle_itself_reads_it():
    data = pickled(batch())
    pixels, labels = cifar.read_batch(data, HERE, b"labels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy has moved what the old files name
        plain = pickle.loads(data, encoding="bytes")
    np.testing.assert_array_equal(pixels.reshape(2, 3072), plain[b"data"])
    assert labels.tolist() == plain[b"labels"]
    assert pixels[1, 2, 5, 7] == plain[b"data"][1, 2 * 1024 + 5 * 32 + 7]  # channel, row, column


def test_class_names_are_text():
    assert cifar.read_names(pickled({b"names": [b"cat", b"d\xffg"]}), HERE, b"names") == ("cat", "d�g")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({b"labels": [1]}, "has no 'data'; it has b'labels'"),
        ({b"data": batch()[b"data"]}, "has no 'labels'"),
        (batch(data=[1, 2]), r"pixels \[n, 3072\] expected, got list"),
        (batch(data=np.zeros((2, 3), np.uint8)), r"pixels \[n, 3072\] expected, got \(2, 3\)"),
        (batch(labels=[1]), "2 labels from 0 to 255 expected"),
        (batch(labels=[1, 256]), "2 labels from 0 to 255 expected"),
        (batch(labels=[1, -1]), "2 labels from 0 to 255 expected"),
        (batch(labels=[1, b"2"]), "2 labels from 0 to 255 expected"),
        (batch(data=np.zeros((2, 3072), np.float32)), "elements of kind b'f4', expected u1"),
        ([1, 2], "it holds list, expected a dictionary"),
        ({1: 2}, "its keys are not plain text"),
    ],
)
def test_a_batch_of_another_form_is_named_with_what_was_expected(content, said):
    with pytest.raises(InputError, match=f"^here.*{said}"):
        cifar.read_batch(pickled(content), HERE, b"labels")


def test_a_meta_file_without_names_is_named():
    for content in ({b"other": [b"cat"]}, {b"names": 3}, {b"names": [1]}):
        with pytest.raises(InputError, match="here has no list of class names under 'names'"):
            cifar.read_names(pickled(content), HERE, b"names")


def test_every_cut_of_a_pickle_is_seen():
    whole = pickled({b"names": [b"cat", b"dog"], b"data": ARRAY})
    for length in range(len(whole)):
        with pytest.raises(InputError, match="here is not a CIFAR file"):
            cifar.unpickle(whole[:length], HERE)


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def payloads(path: Path) -> dict[str, tuple[str, bytes]]:
    """Opcodes of which each would write ``path`` if they were obeyed, and the first thing each asks for."""
    target = _text(str(path))
    command, program = _text(f"touch {path}"), _text(f"open({str(path)!r}, 'w').close()")
    system = _name("os", "system")
    os_module = _call(_name("importlib", "import_module"), _text("os"))
    array = _call(_name("numpy", "ndarray"), b"(K\x01t")
    new_style = _text("numpy") + _text("ndarray.tofile") + b"\x93"
    runstring = _name("numpy.testing._private.utils", "runstring")
    return {
        "shell": ("os.system", _call(system, command)),
        "shell, by its other name": ("posix.system", _call(_name("posix", "system"), command)),
        "shell, old opcode": ("os.system", b"(" + command + b"ios\nsystem\n"),
        "shell, object opcode": ("os.system", b"(" + system + command + b"o"),
        "shell, new opcode": ("os.system", _call(_text("os") + _text("system") + b"\x93", command)),
        "eval": ("builtins.eval", _call(_name("builtins", "eval"), program)),
        "eval of Python 2": ("__builtin__.eval", _call(_name("__builtin__", "eval"), program)),
        "getattr": (
            "builtins.getattr",
            _call(_call(_name("builtins", "getattr"), os_module, _text("system")), command),
        ),
        "NumPy runs text": ("numpy.testing._private.utils.runstring", _call(runstring, program, b"}")),
        "NumPy saves": ("numpy.save", _call(_name("numpy", "save"), target, b"K\x01")),
        "a method of an allowed name": ("numpy.ndarray.tofile", _call(new_style, array, target)),
    }


def protocol(code: bytes) -> bytes:
    return b"\x80\x04" if b"\x93" in code else b"\x80\x02"


NESTED = {
    "alone": lambda code: code,
    "value": lambda code: opcodes({b"data": Raw(code)}),
    "key": lambda code: opcodes({b"labels": [1]})[:-1] + code + b"K\x01u",
    "deep in lists": lambda code: opcodes({b"labels": [1, [2, [Raw(code)]]]}),
    "in the state of an array": lambda code: opcodes(ARRAY)[:-2] + code + b"tb",
    "thrown away": lambda code: code + b"0" + opcodes(batch()),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("kind", payloads(HERE))
def test_a_hostile_pickle_runs_nothing_and_is_named(tmp_path, kind, nested):
    canary = tmp_path / "canary.npy"
    wanted, code = payloads(canary)[kind]
    data = protocol(code) + NESTED[nested](code) + b"."
    with pytest.raises(InputError, match=f"here is not a CIFAR file: it asks for {wanted}, which no CIFAR file needs"):
        cifar.unpickle(data, HERE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", payloads(HERE))
def test_the_hostile_pickles_are_live(tmp_path, kind):
    """Plain pickle obeys every one of them: the test above tests something."""
    canary = tmp_path / "canary.npy"
    code = payloads(canary)[kind][1]
    pickle.loads(protocol(code) + code + b".")
    assert canary.exists()


@pytest.mark.parametrize("name", [("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")])
def test_what_a_pickle_may_name_it_cannot_change(name):
    attributes = b"(}N}X\x08\x00\x00\x00__call__K\x01st"  # (None, {"__call__": 1}): BUILD would set it
    for state in (attributes, b"}X\x01\x00\x00\x00aK\x01s"):
        with pytest.raises(InputError, match="it tries to change"):
            cifar.unpickle(b"\x80\x02" + _name(*name) + state + b"b.", HERE)
    assert len(cifar.read_batch(pickled(batch()), HERE, b"labels")[1]) == 2


@pytest.mark.parametrize(
    "code",
    [
        _call(_name("numpy", "ndarray"), b"(K\x01t"),  # the array kind cannot be called
        _name("numpy", "ndarray") + b"(t\x81",  # nor made anew
        _call(_name("numpy.core.multiarray", "_reconstruct"), b"K\x01", b"K\x00", b"K\x00"),
        _call(_name("numpy", "dtype"), b"U\x01O"),  # arrays of objects
        b"Pname\n",  # persistent names
        b"\x82\x01",  # extension registry
        b"\x97",  # buffers from outside
        b"\x8d" + struct.pack("<Q", 2**62),  # a text longer than the file
    ],
)
def test_other_tricks_of_pickle_end_in_the_same_error(code):
    with pytest.raises(InputError, match="here is not a CIFAR file"):
        cifar.unpickle(b"\x80\x04" + opcodes({b"data": Raw(code)}) + b".", HERE)

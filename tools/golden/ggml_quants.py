"""Make tests/golden/ggml_k and ggml_i: output of GGML's own quantizers for golden_weights.

    python tools/golden/ggml_quants.py LLAMA_CPP

LLAMA_CPP is a checkout of llama.cpp; the committed files come from the one that the source
distribution of llama-cpp-python 0.3.36 contains (vendor/llama.cpp).  Its ggml-quants.c is compiled
without fused multiply-adds, so that each operation is rounded.  Needs a C compiler; the tests do
not.

The files hold, for each format, the bytes of a block in full and the SHA-256 of the bytes of each
kind of weights and importances ("none" calls the quantizer without; missing where GGML refuses to
or makes no difference).  For the formats of ggml_i they also hold the SHA-256 of the weights that
random bytes decode to, and the relative root mean square error on normal weights with importance 1.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from golden_weights import Floats, bell, importances, inputs, integers  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
# name: (number in GGML, weights and bytes of a block)
K_FORMATS = {
    "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176), "q6_k": (14, 256, 210),
}  # fmt: skip
I_FORMATS = {
    "iq4_nl": (20, 32, 18), "iq4_xs": (23, 256, 136), "mxfp4": (39, 32, 17), "nvfp4": (40, 64, 36),
    "iq3_s": (21, 256, 110), "iq3_xxs": (18, 256, 98), "iq2_s": (22, 256, 82),
    "iq2_xs": (17, 256, 74), "iq2_xxs": (16, 256, 66), "q2_0": (42, 64, 18), "tq2_0": (35, 256, 66),
    "iq1_m": (29, 256, 56), "tq1_0": (34, 256, 54), "iq1_s": (19, 256, 50), "q1_0": (41, 128, 18),
}  # fmt: skip
FORMATS = K_FORMATS | I_FORMATS
ONLY_WEIGHTED = ("iq1_s", "iq2_xxs", "iq2_xs")
# GGML misplaces the codes after 32 zeros in an iq3_s block
MISPLACED = {"iq3_s": ("sparse",)}
STUB = """
#include "ggml.h"
#include <stdlib.h>
size_t ggml_row_size(enum ggml_type type, int64_t n) {
    switch ((int) type) { CASES }
    abort();
}
size_t ggml_type_size(enum ggml_type type) { (void) type; abort(); }
const char * ggml_type_name(enum ggml_type type) { (void) type; return "?"; }
void ggml_abort(const char * f, int l, const char * m, ...) { (void) f; (void) l; (void) m; abort(); }
"""  # noqa: E501


def compile_library(source: Path, folder: Path) -> Any:
    """Compile GGML's quantizers into a shared library."""
    ggml = source / "ggml"
    cases = " ".join(f"case {t}: return n / {n} * {b};" for t, n, b in FORMATS.values())
    (folder / "stub.c").write_text(STUB.replace("CASES", cases))
    library, code = folder / "quants.so", ggml / "src" / "ggml-quants.c"
    subprocess.run(
        [
            "cc", "-O2", "-ffp-contract=off", "-DNDEBUG", "-shared", "-fPIC", f"-I{ggml}/include",
            f"-I{ggml}/src", code, folder / "stub.c", "-o", library, "-lm",
        ],
        check=True,
    )  # fmt: skip
    loaded = ctypes.CDLL(str(library))
    for number in (16, 17, 19, 22, 29):
        loaded.iq2xs_init_impl(number)
    for points in (256, 512):
        loaded.iq3xs_init_impl(points)
    return loaded


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    """Return the address of an array, or NULL."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def encode(library: Any, name: str, x: Floats, importance: Floats | None) -> bytes:
    """Return the bytes of rows; `importance` has one row or as many as `x`."""
    _, size, n_bytes = FORMATS[name]
    function = getattr(library, f"quantize_{name.replace('_k', '_K')}")
    function.restype = ctypes.c_size_t
    out = np.zeros((len(x), x.shape[1] // size * n_bytes), np.uint8)
    for row in range(len(x)):
        values, weight = np.ascontiguousarray(x[row]), None
        if importance is not None:
            weight = np.ascontiguousarray(np.broadcast_to(importance, x.shape)[row])
        function(
            pointer(values), pointer(out[row]), ctypes.c_int64(1), ctypes.c_int64(x.shape[1]),
            pointer(weight),
        )  # fmt: skip
    return out.tobytes()


def decode(library: Any, name: str, data: bytes) -> Floats:
    """Return the weights of blocks."""
    _, size, n_bytes = FORMATS[name]
    array = np.frombuffer(data, np.uint8).copy()
    out = np.empty(len(array) // n_bytes * size, np.float32)
    getattr(library, f"dequantize_row_{name}")(
        pointer(array), pointer(out), ctypes.c_int64(out.size)
    )
    return out


def random_blocks(name: str) -> bytes:
    """Return 64 blocks of random bytes; `out` of some is infinite or NaN."""
    return (integers(5, (64, FORMATS[name][2])) >> np.uint64(40)).astype(np.uint8).tobytes()


def digests(library: Any, name: str) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the bytes by kind of weights and importances."""
    labels: dict[str, Floats | None] = {"none": None}
    if name in K_FORMATS or name.startswith("iq"):
        labels |= importances()
    if name in ONLY_WEIGHTED:
        del labels["none"]
    return {
        kind: {
            label: hashlib.sha256(encode(library, name, x, importance)).hexdigest()
            for label, importance in labels.items()
        }
        for kind, x in inputs().items()
        if kind not in MISPLACED.get(name, ())
    }


def k_record(library: Any, name: str) -> dict[str, Any]:
    """Return the golden record of a format of ggml_k."""
    data = encode(library, name, inputs()["normal"][:1], None)
    first = data[: FORMATS[name][2]].hex()
    return {"first_block_of_normal": first, "sha256": digests(library, name)}


def i_record(library: Any, name: str) -> dict[str, Any]:
    """Return the golden record of a format of ggml_i."""
    normal = bell(8, (16, 1024))
    data = encode(library, name, normal, np.ones(1024, np.float32))
    error = decode(library, name, data).astype(np.float64).reshape(normal.shape) - normal
    weights = decode(library, name, random_blocks(name))
    weights[np.isnan(weights)] = 0
    return {
        "first_block_of_normal": data[: FORMATS[name][2]].hex(),
        "error": round(float(np.sqrt(np.square(error).mean() / np.square(normal).mean())), 5),
        "decoded": hashlib.sha256(weights.tobytes()).hexdigest(),
        "sha256": digests(library, name),
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a checkout of llama.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(parser.parse_args().source, Path(folder))
        made = {
            "ggml_k": {name: k_record(library, name) for name in K_FORMATS},
            "ggml_i": {name: i_record(library, name) for name in I_FORMATS},
        }
    for name, records in made.items():
        (GOLDEN / name / "published.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()

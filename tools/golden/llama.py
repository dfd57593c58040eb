"""Make tests/golden/llama: tiny random Llama checkpoints, with the logits of transformers.

    pip install torch transformers
    python tools/golden/llama.py

The tests need neither.  `biased` has grouped heads, biases everywhere, an untied head and a theta
of its own; `tied` has a tied head, float16 weights and a head size that is not hidden_size / heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "llama"
COMMON = {"vocab_size": 160, "num_hidden_layers": 3, "max_position_embeddings": 64}
MODELS = {
    "biased": {
        "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6,
        "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "tied": {
        "hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 20, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    for seed, (name, options) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **options, initializer_range=0.2))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at 1 and 0: make a miss visible
                parameter.data += 0.2 * torch.randn_like(parameter)
            if name == "tied":
                parameter.data = parameter.data.half().float()
        ids = np.random.default_rng(seed).integers(0, 160, 40)
        with torch.no_grad():
            logits = model(torch.tensor(ids)[None]).logits[0].numpy()
        folder = FOLDER / name
        # half() rounds the rotary frequencies too, so it comes after the logits
        (model.half() if name == "tied" else model).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / "ids.npy", ids.astype(np.int32))
        np.save(folder / "logits.npy", logits)


if __name__ == "__main__":
    main()

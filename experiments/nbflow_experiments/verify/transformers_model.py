"""A random checkpoint of transformers, and what it computes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbflow_experiments.verify.recording import Recording
from nbflow_kernels.errors import MissingExtraError, UsageError

NPZ = "or record logits elsewhere and give --against FILE.npz"


def record(folder: Path, config: Mapping[str, Any], n_tokens: int, seed: int) -> Recording:
    """Write a checkpoint with random weights, and record what transformers computes with it.

    Norms, biases and corrections are random too, so that one that is missing shows.  Code in the
    model's folder is never run: the model's type must be one of transformers.

    Parameters
    ----------
    folder : Path
        Where to write config.json and model.safetensors.
    config : mapping
        The configuration; it is written as it is.
    n_tokens : int
        Number of random tokens.
    seed : int
        Seed of weights and tokens.

    Raises
    ------
    MissingExtraError
        If torch or transformers is not installed.
    UsageError
        If transformers cannot make a causal language model of the configuration, or run it.
    """
    torch, transformers = _packages()
    text = json.dumps(config, indent=1)
    (folder / "config.json").write_text(text)
    torch.manual_seed(seed)
    try:
        made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # its eager attention adds Falcon's ALiBi twice
        attention = "sdpa" if getattr(made, "alibi", False) else "eager"
        options = {"dtype": torch.float32, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_config(made, **options).eval()
    except Exception as error:  # transformers raises what its parts raise
        reason = " ".join(str(error).split())
        raise UsageError(
            f"transformers {transformers.__version__} cannot make a causal language model of the "
            f"small configuration ({type(error).__name__}: {reason:.300}); change it with --set "
            f"KEY=VALUE, {NPZ}"
        ) from error
    _randomize(torch, model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)  # as its author wrote it
    (folder / "generation_config.json").unlink(missing_ok=True)
    text_config = made.get_text_config()
    ids = np.random.default_rng(seed).integers(0, text_config.vocab_size, n_tokens)
    try:
        return _run(torch, transformers, model, ids)
    except Exception as error:  # as above
        reason = " ".join(str(error).split())
        raise UsageError(
            f"transformers {transformers.__version__} cannot run the small model "
            f"({type(error).__name__}: {reason:.300}); change its configuration with --set "
            f"KEY=VALUE, {NPZ}"
        ) from error


def _packages() -> tuple[Any, Any]:
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        return torch, transformers
    except ImportError as error:
        raise MissingExtraError(
            f"nbflow verify --against hf needs torch and transformers ({error}): pip install torch "
            f"transformers; {NPZ}"
        ) from error


def _randomize(torch: Any, model: Any) -> None:
    """Give all parameters and corrections random values, matrices by their width."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):  # states that last for some tokens
                parameter.copy_(0.5 * noise - 3.0)
            elif parameter.ndim < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * max(parameter.shape[-1], 1) ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(0.2 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn_like(buffer))


def _run(torch: Any, transformers: Any, model: Any, ids: np.ndarray) -> Recording:
    """Return logits, inputs and outputs of layers, and outputs of their modules."""
    if not (model.config.model_type == "doge" and model.config.is_moe):
        # without a cache, which transformers cannot make for models without attention
        return _run_step(torch, transformers, model, ids, {"use_cache": False})
    # its experts mix the scores of a prompt's tokens, but not where it generates
    cache = {"past_key_values": transformers.DynamicCache(config=model.config)}
    found, *others = (
        _run_step(torch, transformers, model, ids[t : t + 1], cache) for t in range(len(ids))
    )
    for step in others:
        found.ids = np.concatenate([found.ids, step.ids])
        found.logits = np.concatenate([found.logits, step.logits])
        found.layers = {i: np.concatenate([v, step.layers[i]]) for i, v in found.layers.items()}
        if found.embedding is not None and step.embedding is not None:
            found.embedding = np.concatenate([found.embedding, step.embedding])
    found.parts = {}
    return found


def _run_step(
    torch: Any, transformers: Any, model: Any, ids: np.ndarray, options: dict[str, Any]
) -> Recording:
    """Return the recording of one call of the model."""
    found = Recording(f"transformers {transformers.__version__}", ids, np.zeros((0, 0)))
    stack = _layers(torch, model)
    handles = []
    for i, layer in enumerate(stack):
        for name, module in layer.named_modules():
            handles.append(module.register_forward_hook(_recorder(torch, found, i, name, len(ids))))
    if len(stack):
        hook = _input_recorder(torch, found)
        handles.append(stack[0].register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        output = model(torch.tensor(ids)[None], **options)
        found.logits = output.logits[0].double().numpy()
    for handle in handles:
        handle.remove()
    return found


def _layers(torch: Any, model: Any) -> Any:
    """Return the modules of the layers: the list with most of the weights."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    n_layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in lists if len(m) == n_layers]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=())


def _array(torch: Any, value: Any, n_tokens: int) -> np.ndarray | None:
    """Return a tensor of rows per token as float64 (T, columns), or None."""
    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2:
        return None
    if not value.numel():  # of a part without columns
        return None
    rows = value.reshape(-1, value.shape[-1])
    return rows.double().numpy().copy() if len(rows) == n_tokens else None


def _recorder(torch: Any, found: Recording, layer: int, name: str, n_tokens: int) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        array = _array(torch, output, n_tokens)
        if array is None:
            return
        if name:
            found.parts.setdefault(layer, {})[name] = array
        else:
            found.layers[layer] = array

    return hook


def _input_recorder(torch: Any, found: Recording) -> Any:
    def hook(module: Any, inputs: Any, named: Any) -> None:
        value = inputs[0] if inputs else named.get("hidden_states")
        found.embedding = _array(torch, value, len(found.ids))

    return hook

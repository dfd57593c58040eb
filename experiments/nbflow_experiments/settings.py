"""Settings of a sweep point: one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbflow.option_fields import fields
from nbflow.options import LoadOptions, SpeculativeConfig
from nbflow_experiments import backend
from nbflow_kernels.errors import UsageError, unknown_name

Value = str | int | float
MOST_REPETITION_S = 600
"""Upper limit of the setting `min_repetition_s`."""


@dataclass(frozen=True)
class Setting:
    """Setting that a sweep fixes or varies."""

    name: str
    default: Value
    """Default value; its type is the type of the setting."""
    minimum: int
    """Minimum of a number."""
    meaning: str
    words: tuple[str, ...] = ()
    """Words accepted in place of a number."""

    @property
    def is_number(self) -> bool:
        """Return whether its values are numbers."""
        return isinstance(self.default, int | float)

    @property
    def is_integer(self) -> bool:
        """Return whether its values are integers, which accept ranges."""
        return isinstance(self.default, int)


def _of_load(name: str) -> Setting:
    """Return the setting that is an option of `nbflow.load`; "" and 0 stand for its None."""
    known = fields(LoadOptions)[name]
    is_number = known.outside_hint in (int, float)
    absent: Value = 0 if is_number else ""
    default = absent if known.default is None else known.default
    if isinstance(default, bool):
        return Setting(name, int(default), 0, f"{known.option.help}; 1: yes")
    unset = f"; {absent!r}: {known.option.shown or 'none'}" if known.default is None else ""
    return Setting(name, default, 0, f"{known.option.help}{unset}")


OFFLOAD_SETTINGS = ("kv_host_percent", "embeddings_on_host", "cpu_layers")
"""Settings that move a part of a device's rank to the host."""
_ALL = (
    Setting("model", "", 0, "model: folder, file or name of a model specification (required)"),
    Setting(
        "weights",
        "",
        0,
        'format of the weight matrices, a policy file (.toml), or "stored", the formats of the '
        "checkpoint; by default stored for checkpoints in block formats, else f32",
    ),
    *map(_of_load, ("outliers", "quantizer", "importance", "kv", "kv_rotation", "kv_keys")),
    *map(_of_load, ("state", "activations")),
    Setting(
        "device",
        "cpu",
        0,
        "cpu, cuda, cuda:1, emulator (CUDA kernels on the CPU, very slow), or one for each rank of "
        'the partition: "cpu,cuda" (in lists: cpu;cuda)',
    ),
    *map(_of_load, OFFLOAD_SETTINGS),
    *map(_of_load, ("partition", "all_reduce", "optimize")),
    Setting(
        "machine", "", 0, "description to predict with and for 'auto': name, file, or 'measured'"
    ),
    Setting(
        "ranks",
        0,
        0,
        "MPI ranks that are started for the point; 0: those of the launch; auto: as many as the "
        "partition needs",
        ("auto",),
    ),
    Setting("batch", 1, 1, "sequences processed together"),
    Setting("prompt", 128, 1, "tokens of each prompt"),
    Setting("decode", 32, 1, "tokens decoded after each prompt"),
    Setting("prefix", 0, 0, "first tokens that the prompts of 'shared_prefix' have in common"),
    Setting("shared_keys", 1024, 0, "keys that the sequences of 'cascade' have in common"),
    Setting("own_keys", 64, 1, "keys that each of them has besides"),
    Setting(
        "heads",
        "",
        0,
        "query heads/key-value heads/numbers of a head of 'cascade', 32/8/128; empty: the model's",
    ),
    Setting("draft", "ngram", 0, "draft source of 'speculation': ngram, or MODEL[:FORMAT]"),
    Setting("n_draft", SpeculativeConfig.n_draft, 1, "draft tokens per step"),
    Setting("repeats", 5, 1, "repetitions of each timing"),
    Setting("warmup", 1, 0, "untimed repetitions before them"),
    Setting(
        "min_repetition_s", 0.5, 0, "seconds that a timed repetition repeats its work for at least"
    ),
    Setting(
        "eval_text", "", 0, "text file for the quality measures; empty: the model's own eval.txt"
    ),
    Setting("eval_tokens", 4096, 2, "tokens of the text that are evaluated"),
    Setting("eval_window", 256, 2, "tokens of each evaluated window"),
    Setting("eval_context", 1, 1, "first tokens of each window that are not scored"),
    Setting("seed", 0, 0, "seed of the choice of windows"),
    _of_load("max_context"),
    _of_load("threads"),
)

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _ALL}
"""Every setting by name."""


def setting(name: str, kind: str = "setting") -> Setting:
    """Return the setting called `name`, or raise with close names."""
    if name not in SETTINGS:
        raise unknown_name(kind, name, SETTINGS)
    return SETTINGS[name]


def check_value(name: str, value: object, where: str) -> Value:
    """Validate a value of setting `name` and return it.

    Raises
    ------
    UsageError
        If the type is wrong, a number is too small, or a format or partition does not exist.
    """
    known = SETTINGS[name]
    if name in ("outliers", "kv_host_percent"):
        checked = fields(LoadOptions)[name].checked(value, outside=True, name=f"{where}: {name}")
        return float(checked)
    if name == "embeddings_on_host":
        if not isinstance(value, int) or value not in (0, 1):  # false and true are 0 and 1
            raise UsageError(f"{where}: {name} must be 0 or 1, false or true, got {value!r}")
        return int(value)
    if known.is_number:
        return _checked_number(known, value, where)
    if not isinstance(value, str):
        hint = f'; write "{value}"' if isinstance(value, int | float) else ""
        raise UsageError(f"{where}: {name} must be text in quotes, got {value!r:.200}{hint}")
    if name == "importance" and value and not Path(value).is_file():
        raise UsageError(f"{where}: importance: the file {value} does not exist")
    if name == "weights":
        return _checked_weights(value)
    if name in _CHECKS:
        _CHECKS[name](value)
    known_values = backend.choices().get(name, (value,))
    if value not in known_values:
        raise unknown_name(name, value, known_values)
    if name == "device":
        return parse_devices(value)
    return value.lower() if name == "kv" else value


def _checked_number(known: Setting, value: object, where: str) -> Value:
    """Return a number of a setting, or a word in its place."""
    if known.name == "min_repetition_s":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) <= MOST_REPETITION_S:  # type: ignore[arg-type]
            raise UsageError(
                f"{where}: {known.name} must be a number of seconds, 0 to {MOST_REPETITION_S}, got "
                f"{value!r}"
            )
        return float(value)  # type: ignore[arg-type]
    if value in known.words:
        return str(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {known.name} must be an integer, got {value!r}")
    if value < known.minimum:
        raise UsageError(f"{where}: {known.name} must be at least {known.minimum}, got {value}")
    return value


def _checked_weights(value: str) -> str:
    """Return the name of a weight format, or a policy file."""
    if backend.is_policy(value):
        backend.policy_bits(value)  # raises if it is none
        return value
    if not backend.is_weight_format(value):
        raise unknown_name("weight format", value, (backend.STORED, *backend.format_names()))
    return value.lower()


def parse_devices(text: str) -> str:
    """Return names of devices, checked and separated by commas.

    Examples
    --------
    >>> parse_devices("cpu; cuda:1")
    'cpu,cuda:1'
    """
    names = [name.strip().lower() for name in text.replace(";", ",").split(",")]
    for name in names:
        kind, _, number = name.partition(":")
        if name not in backend.DEVICES and not (kind == "cuda" and number.isdecimal()):
            raise unknown_name("device", name, (*backend.DEVICES, "cuda:1"))
    return ",".join(names)


def parse_heads(text: str) -> tuple[int, int, int]:
    """Parse ``"32/8/128"``: query heads, key/value heads, head size."""
    numbers = tuple(int(word) if word.isdecimal() else 0 for word in text.split("/"))
    if len(numbers) != 3 or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise UsageError(
            f"heads must be query heads/key-value heads/numbers of a head, e.g. 32/8/128, the "
            f"first a multiple of the second, got {text!r}"
        )
    return numbers


def _check_heads(text: str) -> None:
    """Raise unless heads are given, or those of the model are meant."""
    if text:
        parse_heads(text)


_CHECKS: dict[str, Callable[[str], object]] = {
    "quantizer": backend.check_quantizer,
    "kv": backend.check_kv,
    "partition": backend.partition_ranks,
    "machine": backend.check_machine,
    "heads": _check_heads,
}
"""Functions that raise for a value that a setting does not accept."""


def resolve_words(config: dict[str, Value]) -> None:
    """Resolve words to numbers: ``ranks = "auto"``."""
    if config["ranks"] == "auto":
        if config["partition"] == "auto":
            raise UsageError(
                "ranks = 'auto' counts the ranks that a partition names, and partition = 'auto' "
                "names none; say how many: ranks = 2"
            )
        config["ranks"] = highest_rank(config) + 1


def highest_rank(config: Mapping[str, Value]) -> int:
    """Return the highest rank of a point, the one that computes `cpu_layers` included."""
    return max(backend.partition_ranks(str(config["partition"]))) + bool(config["cpu_layers"])


def _check_offload(config: Mapping[str, Value]) -> None:
    """Raise if settings move something to the host where nothing is on a device."""
    given = [f"{name} = {config[name]}" for name in OFFLOAD_SETTINGS if config[name]]
    device, partition = str(config["device"]), str(config["partition"])
    if given and all(name == "cpu" for name in device.split(",")):
        raise UsageError(
            f"{', '.join(given)} {'have' if len(given) > 1 else 'has'} no effect on device "
            f"{device!r}, where everything is on the host; exclude such points: [[exclude]] with "
            "both lines"
        )
    if config["cpu_layers"] and (partition != "0" or "," in device):
        raise UsageError(
            f"cpu_layers = {config['cpu_layers']} needs partition = '0' on one device; for several "
            "ranks name a CPU rank, e.g. partition = '0:2;1:6', device = 'cpu,cuda'; got "
            f"partition = {partition!r}, device = {device!r}"
        )


def _check_devices(device: str, partition: str) -> None:
    """Raise unless there is one device, or one for each rank of the partition."""
    n_devices = len(device.split(","))
    if n_devices == 1:
        return
    if partition == "auto":
        raise UsageError(
            f"device = {device!r} names a device for each rank, and partition = 'auto' names no "
            "ranks; name one device, or a partition"
        )
    n_ranks = len(backend.partition_ranks(partition))
    if n_devices != n_ranks:
        raise UsageError(
            f"device = {device!r} names {n_devices} devices, partition {partition!r} {n_ranks} "
            "ranks; name one device for all, or one for each; [[zip]] varies both together, "
            "[[exclude]] leaves points out"
        )


def check_configuration(config: dict[str, Value]) -> None:
    """Raise `UsageError` if the settings of a point are inconsistent."""
    if not config["model"]:
        raise UsageError(
            "the sweep names no model; write [settings] model = ... or an axis 'model'"
        )
    _check_devices(str(config["device"]), str(config["partition"]))
    _check_offload(config)
    if config["quantizer"] == "outliers" and not config["outliers"]:
        raise UsageError("quantizer 'outliers' needs outliers, a share of the weights, e.g. 0.005")
    weights = str(config["weights"]) or "f32"
    if config["outliers"] and (weights == backend.STORED or backend.is_float_format(weights)):
        raise UsageError(
            f"outliers = {config['outliers']} needs weights in a block format, got "
            f"{weights}; exclude such points: [[exclude]] with both lines"
        )
    if int(config["prefix"]) > int(config["prompt"]):
        raise UsageError(
            f"prefix must be at most prompt, got {config['prefix']} and {config['prompt']}: it is "
            f"the beginning of the prompts"
        )
    window, skipped = int(config["eval_window"]), int(config["eval_context"])
    if skipped >= window:
        raise UsageError(
            f"eval_context must be less than eval_window, got {skipped} and {window}; at least one "
            f"token of each window must be scored"
        )
    if int(config["eval_tokens"]) < window:
        raise UsageError(
            f"eval_tokens must be at least eval_window, got {config['eval_tokens']} and {window}"
        )

"""Definitions of the columns of ``points.csv`` and ``results.csv``."""

from __future__ import annotations

from nbflow_experiments.measures import MEASURES

STATUS: dict[str, str] = {
    "point": "identifier, the first 12 digits of the sha256 of all inputs of the point",
    "status": "done, failed, oom (a rank ran out of memory), timeout, or nonfinite",
    "attempt": "number of the attempt whose result this is",
    "error_type": "class of the error of a failed point",
    "error_message": "message of the error",
    "error_step": "measure, or other step, that failed",
    "wall_s": "seconds that the point took, loading included",
    "quality_shared_from": "point that measured the quality of this configuration",
    "partition_chosen": "partition that ran, where the setting is auto",
    "devices": "hardware of the ranks, if the measure `memory` ran; the emulator is none",
}
"""First columns of ``points.csv``."""

RESULTS: dict[str, str] = {
    "point": "identifier, as in points.csv",
    "rank": "MPI rank of the number; empty: the whole model",
    "repeat": "index of the repetition; empty: the summary",
    "measure": "measure that recorded it",
    "metric": "name, a column of points.csv for summaries",
    "value": "the number, with all digits",
    "unit": "unit; 1 for ratios and counts",
    "n": "observations that the number summarizes",
    "stderr": "standard error, where one is defined",
}
"""Columns of ``results.csv``."""

_RATE = "generated tokens per second of all sequences"
METRICS: dict[str, dict[str, tuple[str, str]]] = {
    "": {
        "bits_per_weight": ("bit", "stored bits per weight of the format, scales included"),
    },
    "weight_error": {
        "weight_error_relative": ("1", "||Q(W) - W|| / ||W|| over all quantized matrices"),
        "weight_error_worst_tensor_relative": ("1", "the same of the matrix with the largest"),
        "stored_bits_per_weight": ("bit", "bytes of the matrices with padding and outliers"),
    },
    "perplexity": {
        "perplexity": ("1", "exp of the mean negative log-likelihood of the scored tokens"),
        "nll_mean_nats": ("nat", "mean negative log-likelihood per token"),
        "nonfinite_share": ("1", "share of tokens whose likelihood is not finite"),
    },
    "divergence": {
        "kld_mean_nats": ("nat", "mean KL(float32 model || model) per token"),
        "kld_median_nats": ("nat", "median over the tokens"),
        "kld_p90_nats": ("nat", "90th percentile"),
        "kld_p95_nats": ("nat", "95th percentile"),
        "kld_p99_nats": ("nat", "99th percentile"),
        "kld_max_nats": ("nat", "largest"),
        "top1_agreement_share": ("1", "share of tokens with the same most likely next token"),
        "nll_difference_mean_nats": ("nat", "mean paired difference of the log-likelihoods"),
    },
    "prefill": {
        "prefill_tokens_per_s": ("token/s", "prompt tokens per second, median of the repetitions"),
        "prefill_min_tokens_per_s": ("token/s", "slowest repetition"),
        "prefill_max_tokens_per_s": ("token/s", "fastest repetition"),
    },
    "decode": {
        "decode_tokens_per_s": ("token/s", f"{_RATE}, median of the repetitions"),
        "decode_min_tokens_per_s": ("token/s", "slowest repetition"),
        "decode_max_tokens_per_s": ("token/s", "fastest repetition"),
    },
    "batching": {
        "batching_tokens_per_s": ("token/s", f"{_RATE}, requests batched continuously"),
        "batching_ttft_s": ("s", "median time to first token, batched"),
        "sequential_tokens_per_s": ("token/s", f"{_RATE}, one request after the other"),
        "sequential_ttft_s": ("s", "median time to first token, one after the other"),
        "batching_speedup": ("1", "median ratio of the rounds, sequential time to batched time"),
    },
    "shared_prefix": {
        "prefix_cold_ttft_s": ("s", "median time to first token, nothing shared"),
        "prefix_together_ttft_s": ("s", "the same, the prefix computed by the first request"),
        "prefix_ttft_s": ("s", "the same, the prefix in the cache before"),
        "prefix_ttft_speedup": ("1", "median ratio of the rounds, cold to cached"),
        "prefix_cached_share": ("1", "share of the prompts' tokens that came from the cache"),
        "prefix_same_share": ("1", "share of requests with the same tokens in all three runs"),
    },
    "cascade": {
        "cascade_flat_s": ("s", "attention of one step, every sequence reads all of its keys"),
        "cascade_shared_s": ("s", "the same, shared pages read once"),
        "cascade_levels_s": ("s", "the same, by two levels and a merge"),
        "cascade_shared_speedup": ("1", "median ratio, flat to shared"),
        "cascade_levels_speedup": ("1", "median ratio, flat to levels"),
        "cascade_flat_bytes": ("B", "bytes of keys and values read flat"),
        "cascade_bytes": ("B", "bytes read with shared pages read once"),
        "cascade_byte_ratio": ("1", "their quotient, the bound of the speed-up"),
        "cascade_same_share": ("1", "share of rows with equal bits, flat and shared"),
    },
    "speculation": {
        "plain_tokens_per_s": ("token/s", f"{_RATE}, without draft tokens"),
        "speculation_tokens_per_s": ("token/s", f"{_RATE}, with draft tokens"),
        "speculation_speedup": ("1", "median ratio of the rounds, plain time to speculative time"),
        "speculation_tokens_per_step": ("1", "tokens per verification step, with the bonus token"),
        "speculation_same_share": ("1", "share of requests with the same tokens in both runs"),
        "speculation_accepted_share": ("1", "share of draft tokens that were accepted"),
    },
    "traffic": {
        "traffic_measured_bytes": ("byte", "payload that ranks sent in one decode repetition"),
        "traffic_predicted_bytes": ("byte", "the partition's prediction of it"),
        "traffic_bytes_per_token": ("byte/token", "measured bytes per prompt and decoded token"),
        "all_reduce_error_relative": ("1", "rounding error of partial sums sent in 8 bits"),
    },
    "memory": {
        "weight_bytes": ("byte", "weights of all ranks; in results.csv also of each"),
        "kv_bytes": (
            "byte",
            "key/value caches of all ranks, for the point's own batch and lengths",
        ),
        "kv_allocated_bytes": ("byte", "key/value pages that all ranks allocated, free ones too"),
        "workspace_bytes": ("byte", "buffers of steps and rotary tables of all ranks"),
        "peak_rss_bytes": (
            "byte",
            "largest peak resident set of a process while the point's batch runs",
        ),
        "plan_weight_bytes": ("byte", "the memory plan's prediction of weight_bytes"),
        "plan_kv_bytes": ("byte", "the same of kv_allocated_bytes"),
        "plan_workspace_bytes": ("byte", "the same of workspace_bytes"),
        "step_bytes": (
            "byte",
            "on devices: index arrays, attention plans, workspaces of kernels and graphs",
        ),
        "plan_step_bytes": ("byte", "the memory plan's prediction of step_bytes"),
        "graph_bytes": ("byte", "the part of step_bytes that CUDA graphs hold"),
        "communicator_bytes": ("byte", "memory that devices lost while NCCL was set up"),
        "vram_before_bytes": (
            "byte",
            "memory in use on the devices before the model was loaded, of all programs",
        ),
        "vram_load_bytes": ("byte", "what was added to it after loading, by the driver's count"),
        "vram_bytes": ("byte", "the same after the point's batch"),
        "vram_peak_bytes": ("byte", "the same, largest reading while the batch ran"),
        "pool_bytes": ("byte", "CuPy's memory pools, which keep freed blocks; CUDA alone"),
        "nvml_bytes": (
            "byte",
            "the processes' memory by NVML, CUDA contexts included; CUDA with nvidia-ml-py",
        ),
        "plan_vram_bytes": (
            "byte",
            "the memory plan's prediction of vram_bytes: all parts of the plan that are on devices",
        ),
    },
    "prediction": {
        "predicted_prefill_tokens_per_s": ("token/s", "the planner's prediction, with `machine`"),
        "predicted_decode_tokens_per_s": ("token/s", "the same of decoding"),
        "predicted_weight_bytes": ("byte", "the same of weights"),
        "predicted_kv_bytes": ("byte", "the same of caches"),
        "predicted_bubble_share": ("1", "share of decode time that pipeline stages idle"),
        "predicted_all_reduce_share": ("1", "share of decode time spent in all-reduces"),
    },
}
"""Metrics by measure: unit and definition.  ``NAME_stderr`` is the standard error of NAME."""


def points_table() -> str:
    """Return a Markdown table of all columns but the settings."""
    lines = ["| status | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in STATUS.items()]
    for measure, columns in METRICS.items():
        extra = "" if measure not in MEASURES or MEASURES[measure].by_default else " (on request)"
        lines.append(f"| **{measure or 'format'}**{extra} | |")
        lines += [
            f"| `{name}` | {'' if unit == '1' else f'[{unit}] '}{_cell(meaning)} |"
            for name, (unit, meaning) in columns.items()
        ]
    return "\n".join(lines)


def results_table() -> str:
    """Return a Markdown table of the columns of ``results.csv``."""
    lines = ["| column | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {meaning} |" for name, meaning in RESULTS.items())])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

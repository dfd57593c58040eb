"""Plans of wrappers with ``use_cuda_graph=True``: fixed size, refilled in place.

The launches of `run` are captured once.  Each later `plan` writes the step's tables to the caller's
buffers and the wrapper's own, at unchanged addresses, where replayed launches read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, check_together, is_cuda
from nbflow_kernels.attention.cuda.plan import (
    StaticPlanBuffers,
    device_plan,
    floats_in,
    partial_floats,
)
from nbflow_kernels.attention.options import Options, PlanInputs
from nbflow_kernels.attention.plan import AttentionPlan, Tables, make_plan, plan_into, set_rotation
from nbflow_kernels.cuda import device_of
from nbflow_kernels.errors import UsageError

SPLITS_PER_SM = 128
"""Work items reserved for split tiles, per multiprocessor."""
MAX_PARTIAL_FLOATS = 32 << 20
"""Default split-KV workspace: 128 MiB, the size that FlashInfer's guide uses."""
ROLES = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
"""Tables that caller buffers may hold."""


def graph_of(use_cuda_graph: bool, buffers: Mapping[str, tuple[str, Any]]) -> GraphPlan | None:
    """Return the graph plan of a wrapper, or None without `use_cuda_graph`; check the buffers.

    `buffers` maps the roles in use (see `ROLES`) to parameter names and arrays.
    """
    names = ", ".join(name for name, _ in buffers.values())
    for name, buffer in buffers.values():
        if use_cuda_graph and buffer is None:
            raise UsageError(f"use_cuda_graph needs the buffers {names}; {name} is missing")
        if not use_cuda_graph and buffer is not None:
            raise UsageError(f"{name} is for use_cuda_graph=True, got use_cuda_graph=False")
    return GraphPlan(buffers) if use_cuda_graph else None


class GraphPlan:
    """Plan of a wrapper with `use_cuda_graph`, with the buffers of its tables.

    Parameters
    ----------
    buffers : mapping of str to (str, array)
        Parameter name and int32 array of each role in use (see `ROLES`).

    Raises
    ------
    UsageError, TypeError
        If the buffer sizes are inconsistent, or they are not int32 arrays on one device.
    """

    def __init__(self, buffers: Mapping[str, tuple[str, Any]]) -> None:
        for name, buffer in buffers.values():
            check_array(name, buffer, (None,), np.int32)
        check_together(**dict(buffers.values()))
        self._names = {role: name for role, (name, _) in buffers.items()}
        self._buffers = {role: buffer for role, (_, buffer) in buffers.items()}
        last = "last_page_len" if "last_page_len" in buffers else "kv_indptr"
        self.batch_size = len(self._buffers[last]) - (last == "kv_indptr")
        for role in ("qo_indptr", "kv_indptr"):
            if role in buffers and len(self._buffers[role]) != self.batch_size + 1:
                raise UsageError(
                    f"{self._names[role]} must have {self.batch_size + 1} elements for the "
                    f"{self.batch_size} requests of {self._names[last]}, got "
                    f"{len(self._buffers[role])}"
                )
        self.on_device = is_cuda(next(iter(self._buffers.values())))
        self.n_rows = self.n_keys = 0
        """Largest number of query rows, and of ragged keys: those of the first plan."""
        self._plan: AttentionPlan | None = None
        self._settings: dict[str, Any] = {}
        self._tables: StaticPlanBuffers | None = None

    @property
    def is_planned(self) -> bool:
        """Return whether the first plan was made, which fixes the sizes."""
        return self._plan is not None

    def check_device(self, q: Any) -> None:
        """Raise unless queries and buffers are on the same device."""
        if is_cuda(q) != self.on_device:
            devices = ("in host memory", "on a CUDA device")
            name = next(iter(self._names.values()))
            raise UsageError(
                f"q is {devices[is_cuda(q)]}, the buffers of use_cuda_graph ({name}, ...) are "
                f"{devices[self.on_device]}: pass buffers on the same device"
            )

    def fill(
        self,
        tables: Tables,
        heads: tuple[int, int, int, int],
        page_size: int,
        options: Options,
        inputs: PlanInputs,
        workspace: Any,
        last_page_len: Any,
    ) -> AttentionPlan:
        """Write a step to the buffers; return the plan: `make_plan` the first time."""
        if inputs.objects:
            name = next(iter(inputs.objects))
            raise UsageError(f"{name} is not supported with use_cuda_graph=True: it has no buffer")
        check_indptr("qo_indptr", tables[0], len(tables[1]))
        # all but the workspace and whether to wait must be the same in all plans
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo")
        settings = {
            **dict(zip(names, heads, strict=True)), "page_size": page_size, **vars(options),
            **vars(inputs),
        }  # fmt: skip
        settings["fixed_split_size"] = settings.pop("split_keys")
        del settings["non_blocking"]
        self._check(tables, settings)
        tables = self._place(tables, last_page_len)
        plan = self._plan
        if plan is None:
            plan = make_plan(tables, heads, page_size, options, inputs, workspace)
            self.n_rows, self.n_keys = plan.n_rows, self._n_keys_of(tables)
            plan.fixed_rows, self._plan, self._settings = self.n_rows, plan, settings
            plan.waits_for_copies = False  # `run` may be captured: wait here instead
        else:
            plan.workspace = workspace
            if options.pos_encoding_mode == "ROPE_LLAMA":
                set_rotation(plan, options, tables[3])
            plan_into(plan, *tables)
        if self.on_device:
            self._to_device(plan, inputs.q_len_per_req)
            if not inputs.non_blocking:
                device_of(self._buffers["kv_indptr"]).synchronize()
        return plan

    def _n_keys_of(self, tables: Tables) -> int:
        """Return the number of ragged keys of a step; 0 with pages."""
        _, _, starts, lens = tables
        return 0 if "kv_indices" in self._buffers else int((starts[-1:] + lens[-1:]).sum())

    def _check(self, tables: Tables, settings: dict[str, Any]) -> None:
        """Raise unless the step fits the buffers and the first plan."""
        qo_indptr, kv_indptr, _, kv_lens = tables
        if len(kv_lens) != self.batch_size or len(qo_indptr) != self.batch_size + 1:
            raise UsageError(
                f"the batch must have {self.batch_size} requests, the size of the use_cuda_graph "
                f"buffers, got {len(kv_lens)}; pad with requests without rows and keys"
            )
        if "kv_indices" in self._buffers and kv_indptr[-1] > len(self._buffers["kv_indices"]):
            raise UsageError(
                f"{self._names['kv_indices']} must hold {kv_indptr[-1]} pages, got "
                f"{len(self._buffers['kv_indices'])} elements"
            )
        if self._plan is None:
            return
        for name, value in settings.items():
            if value != self._settings[name]:
                raise UsageError(
                    f"{name} must stay {self._settings[name]!r} with use_cuda_graph, got "
                    f"{value!r}; make another wrapper"
                )
        for name, most, found in (
            ("qo_indptr", self.n_rows, int(qo_indptr[-1])),
            ("kv_indptr", self.n_keys, self._n_keys_of(tables)),
        ):
            if found > most:
                raise UsageError(
                    f"{name} must end at {most} or less with use_cuda_graph, the end in the first "
                    f"plan, got {found}; plan the largest step first"
                )

    def _place(self, tables: Tables, last_page_len: Any) -> Tables:
        """Copy a step to the buffers; return its host tables."""
        n_pages = int(tables[1][-1])
        given: dict[str, Any] = dict(zip(ROLES, (*tables[:3], last_page_len), strict=True))
        if "kv_indices" in self._buffers:
            given["kv_indices"] = tables[2][:n_pages]
        else:  # ragged keys: row offsets
            given["kv_indptr"] = np.append(tables[2], tables[2][-1:] + tables[3][-1:])
        for role, buffer in self._buffers.items():
            part, array = buffer[: len(given[role])], given[role]
            if len(array):
                part[...] = device_of(buffer).asarray(array) if self.on_device else array
            if not self.on_device:
                given[role] = part
        if "kv_indices" not in self._buffers:
            given["kv_indices"] = given["kv_indptr"][: self.batch_size]
            given["kv_indptr"] = tables[1]
        return given["qo_indptr"], given["kv_indptr"], given["kv_indices"], tables[3]

    def _to_device(self, plan: AttentionPlan, rows_each: int | None) -> None:
        """Schedule the step on the device and upload the tables without a caller buffer."""
        device = device_of(self._buffers["kv_indptr"])
        limit = MAX_PARTIAL_FLOATS
        if plan.workspace is not None:
            limit = floats_in(plan.workspace)[1]
        max_partials = limit // partial_floats(plan.heads)
        tables = self._tables
        if tables is None:
            buffers, n_keys = self._buffers, self.n_keys
            if "kv_indices" in buffers:
                n_keys = len(buffers["kv_indices"]) * plan.page_size
                device_tables = [buffers["kv_indptr"], buffers["kv_indices"]]
            else:
                device_tables = [None, buffers["kv_indptr"]]
            tables = self._tables = StaticPlanBuffers(
                plan, device, self.n_rows, self.n_rows if rows_each is None else rows_each,
                n_keys=n_keys, device_tables=(buffers.get("qo_indptr"), *device_tables, None),
                max_splits=SPLITS_PER_SM * device.n_sms, max_partials=max_partials,
            )  # fmt: skip
            tables.device_buffer = device.empty(len(tables.host), np.int32)
            device_plan(plan, device_of(buffers["kv_indptr"])).fix(tables)
        tables.max_partials = min(max_partials, tables.padded.n_partials)
        tables.fill()
        tables.device_buffer[...] = device.asarray(tables.host)
        device_plan(plan, device_of(self._buffers["kv_indptr"])).refresh()

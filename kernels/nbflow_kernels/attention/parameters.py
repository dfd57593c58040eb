"""What every attention kernel that walks over a plan takes."""

from __future__ import annotations

PARAMETERS = (
    "i64* header, any* queries, i64 q_row_bytes, i32 q_kind, any* k, any* v, "
    + ", ".join(f"i64 {which}_{step}" for which in "kv" for step in ("page", "token", "head"))
    + ", f32 cap, any* out, i32 out_kind, f32*? lse"
)

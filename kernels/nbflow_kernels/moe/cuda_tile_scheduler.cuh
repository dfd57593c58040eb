// Tile scheduler of the fused MoE kernels: work of each warp, and its partial sums (split-K as in
// `quantized_matmul/cuda_split_k.cuh`).
//
// Rows with fewer units than SPLITS have a split per unit, and warps take several row tiles at once.  The
// sums are the same, since those of empty splits are zeros.
#pragma once
#include "quantized_matmul/cuda_split_k.cuh"
#include "quantized_matmul/cuda_weight_pipeline.cuh"

// A warp's share of a work item.
struct WarpWork {
  int busy;
  int tile;              // which of the item's row tiles
  int split;
  int unit_0, unit_1;
  int per_item;          // warps that share a row tile
};

// Columns of a matrix, splits divided into `parts`; a work item is one part of `at_once` row tiles.
struct Columns {
  int n, parts;

  DEV_METHOD int n_chunks() const { return (n + CHUNK - 1) / CHUNK; }
  DEV_METHOD int n_units() const { return (n_chunks() + 1) / 2; }
  DEV_METHOD int per_item() const { return min(SPLITS, n_units()) / parts; }
  DEV_METHOD int at_once() const { return WARPS / per_item(); }
  DEV_METHOD int item_units() const { return at_once() * n_units() / parts; }
  DEV_METHOD int n_groups(int n_rows) const {
    return ((n_rows + 15) / 16 + at_once() - 1) / at_once();
  }
  DEV_METHOD int first_unit(int split) const {
    return n_units() < SPLITS ? split : split_start(split, n_units());
  }
  DEV_METHOD WarpWork own(int part, int warp) const {
    const int per = per_item(), split = part * per + warp % per;
    return {warp < per * at_once(), warp / per, split, first_unit(split), first_unit(split + 1), per};
  }
};

// acc += a warp's units; `now` holds the first unit, and then the first unit of the next item at `then`.
DEV void multiply_units(
    const Table& table, Unit& now, const u8* at, const WarpWork& own, int n_chunks, const u8* then,
    int n_then, const u8* records, int lane, float acc[4]) {
  records += 2 * own.unit_0 * Record<NB>::BYTES;
#pragma unroll 1
  for (int unit = own.unit_0; unit < own.unit_1; unit++) {
    const bool last = unit + 1 == own.unit_1;
    const u8* after = last ? then : at + UNIT_BYTES;
    multiply_unit(table, now, at, min(2, n_chunks - 2 * unit), after,
                  last ? n_then : n_chunks - 2 * (unit + 1), records, lane, acc);
    at = after;
    records += 2 * Record<NB>::BYTES;
  }
}

// Store a warp's results of 16 rows and NB tokens.
DEV void store_sums(float* to, const float acc[4], int lane) {
  const int row = lane >> 2;
  if constexpr (NB == 8) {
    *(float2*)(to + row * 8 + 2 * (lane & 3)) = make_float2(acc[0], acc[1]);
    *(float2*)(to + row * 8 + 64 + 2 * (lane & 3)) = make_float2(acc[2], acc[3]);
  } else if ((lane & 3) < NB) {
    to[row * NB + (lane & 3)] = acc[0], to[(row + 8) * NB + (lane & 3)] = acc[2];
  }
}

// Add a result over `n` warps, in order.
DEV float sum_of_warps(const float* sums, int n) {
  float v = 0.0f;
  for (int s = 0; s < n; s++) v += sums[s * 16 * NB];
  return v;
}

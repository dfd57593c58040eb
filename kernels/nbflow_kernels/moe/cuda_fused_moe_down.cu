// Fused MoE, second kernel: down projections of the active experts and the shared expert, weighted sum of
// their results, and residual, for up to 8 tokens.
//
// A thread block has contiguous work items, each some row tiles of an expert (and a part of its columns,
// where the staged tokens would not fit), so it stages the tokens of few experts.  Results are kept in global
// memory; the last thread block to finish a row tile (arrival counter) adds them, in the order of `ids`.
#include "moe/cuda_active_experts.cuh"
#include "moe/cuda_tile_scheduler.cuh"

struct Matrices {
  const u8* data;
  const float* hidden;  // (pairs or tokens, columns)
  float* results;       // (pairs or tokens, n_sums, rows)
  i64 bytes, tile_bytes;
  int n_columns, parts;

  DEV_METHOD Columns columns() const { return {n_columns, parts}; }
  DEV_METHOD int n_sums() const { return parts > 1 ? SPLITS : 1; }

  // Result of row `row` for a pair or a token, splits added in order.
  DEV_METHOD float result(int of, int row, int n_rows) const {
    const float* from = results + (i64)of * n_sums() * n_rows + row;
    float v = 0.0f;
    for (int s = 0; s < n_sums(); s++) v += __ldcg(from + (i64)s * n_rows);
    return parts > 1 ? __fmul_rn(v, OUT) : v;
  }
};

struct Sums {
  const float *weights, *shared_factors;  // per pair; per token or null
  const int* ids;
  float *out, *x;  // (tokens, rows): the sums, or if x is not null `scale` times them added to it
  i64 out_stride, x_stride;
  float scale;
  int k, first_expert, n_experts;

  DEV_METHOD bool is_here(int pair) const {
    return (u32)(ids[pair] - first_expert) < (u32)n_experts;
  }

  // Combine the rows of a tile for all tokens; by a warp.
  DEV_METHOD void finish(
      const Matrices& experts, const Matrices& shared_expert, int tile, int n_tokens,
      int n_rows) const {
    for (int i = threadIdx.x & 31; i < 16 * n_tokens; i += 32) {
      const int row = tile * 16 + i % 16, token = i / 16;
      if (row >= n_rows) continue;
      float total = 0.0f;
      for (int j = 0; j < k; j++) {
        const int pair = token * k + j;
        if (is_here(pair)) total = fmaf(weights[pair], experts.result(pair, row, n_rows), total);
      }
      if (shared_expert.data != nullptr) {
        float v = shared_expert.result(token, row, n_rows);
        if (shared_factors != nullptr) v = __fmul_rn(v, shared_factors[token]);
        total = __fadd_rn(total, v);
      }
      if (x != nullptr) {
        float* to = x + token * x_stride + row;
        *to = __fmaf_rn(scale, total, *to);
      } else {
        out[token * out_stride + row] = total;
      }
    }
  }
};

struct Item {
  int is_shared, active, part, group;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) experts_down(
    Matrices experts, Matrices shared_expert, Sums sums, const Plan* plan, int* arrived, int n_tokens,
    int n_rows, int record_bytes, int padding) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ int pairs[MAX_TOKENS], n_pairs, ready[32 * WARPS], n_ready;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int n_tiles = (n_rows + 15) / 16;
  const bool has_shared = shared_expert.data != nullptr;
  const Columns own_columns = experts.columns(), all_columns = shared_expert.columns();
  const int own_groups = own_columns.n_groups(n_rows);
  const int all_groups = has_shared ? all_columns.n_groups(n_rows) : 1;
  const int of_shared = has_shared ? all_groups * all_columns.parts : 0;
  const int of_expert = own_groups * own_columns.parts;

  // The cost of an item is the units it reads; thread block b has the items that start in its share.
  const int own_cost = own_columns.item_units(), all_cost = has_shared ? all_columns.item_units() : 1;
  const i64 costs_of_shared = (i64)of_shared * all_cost;
  const i64 costs = costs_of_shared + (i64)plan->n * of_expert * own_cost;
  auto first_item = [&](i64 cost) {
    if (cost <= costs_of_shared) return (int)((cost + all_cost - 1) / all_cost);
    return of_shared + (int)((cost - costs_of_shared + own_cost - 1) / own_cost);
  };
  const int start = first_item(blockIdx.x * costs / gridDim.x);
  const int end = first_item((blockIdx.x + 1) * costs / gridDim.x);
  auto item_at = [&](int i) -> Item {
    if (i < of_shared) return {1, 0, i / all_groups, i % all_groups};
    i -= of_shared;
    return {0, i / of_expert, i % of_expert / own_groups, i % own_groups};
  };
  auto columns_of = [&](const Item& item) -> Columns {
    if (item.is_shared) return {all_columns.n, all_columns.parts};
    return {own_columns.n, own_columns.parts};
  };
  auto own_of = [&](const Item& item) {
    return columns_of(item).own(item.part, warp);
  };
  auto units_at = [&](const Item& item, const WarpWork& own) {
    const u8* base = shared_expert.data;
    if (!item.is_shared) base = experts.data + plan->active[item.active].expert * experts.bytes;
    const int tile = min(item.group * columns_of(item).at_once() + own.tile, n_tiles - 1);
    return base + tile * (item.is_shared ? shared_expert.tile_bytes : experts.tile_bytes) +
           own.unit_0 * (i64)UNIT_BYTES;
  };

  for (int i = threadIdx.x; i < record_bytes / 16; i += 32 * WARPS)  // columns without a token
    ((uint4*)shared)[i] = make_uint4(0, 0, 0, 0);
  Table table;
  table.load(n_rows >> 31, lane);
  Unit now;
  Item item = item_at(start), staged = {0, -1, 0, 0};
  WarpWork own = own_of(item);
  const u8* at = nullptr;
  if (start < end && own.busy) {
    at = units_at(item, own);
    load_unit(now, at, columns_of(item).n_chunks() - 2 * own.unit_0, lane);
  }
  for (int i = start, turn = 0; i < end; i++) {
    const float* hidden = item.is_shared ? shared_expert.hidden : experts.hidden;
    const Columns columns = columns_of(item);
    const int chunk_0 = 2 * columns.first_unit(item.part * columns.per_item());
    if (item.is_shared != staged.is_shared || item.active != staged.active || item.part != staged.part) {
      staged = item;
      __syncthreads();
      if (warp == 0) {
        int pair = lane < n_tokens ? lane : -1;
        if (pair >= 0 && !item.is_shared) pair = plan->active[item.active].pairs[lane];
        const u32 mask = __ballot_sync(0xffffffffu, pair >= 0);
        if (pair >= 0) pairs[__popc(mask & ((1u << lane) - 1u))] = pair;
        if (lane == 0) n_pairs = __popc(mask);
      }
      __syncthreads();
      const int chunk_1 =
          min(2 * columns.first_unit((item.part + 1) * columns.per_item()), columns.n_chunks());
      for (int c = warp; c < (chunk_1 - chunk_0) * n_pairs; c += WARPS) {
        const float* row = hidden + (i64)pairs[c % n_pairs] * columns.n;
        const int chunk = c / n_pairs;
        const float4 v =
            load_four(row, (chunk_0 + chunk) * CHUNK + 4 * lane, columns.n, ((u64)row & 15) == 0);
        stage<NB>(v, shared + chunk * Record<NB>::BYTES, c % n_pairs, lane);
      }
      __syncthreads();
    }
    const Item next = i + 1 < end ? item_at(i + 1) : item;
    const WarpWork next_own = own_of(next);
    const bool more = i + 1 < end && next_own.busy;
    const u8* then = more ? units_at(next, next_own) : at;
    const int n_then = more ? columns_of(next).n_chunks() - 2 * next_own.unit_0
                            : columns.n_chunks() - 2 * own.unit_0;
    float* to = (float*)(shared + record_bytes) + (turn ^= 1) * WARPS * 16 * NB;  // double buffer
    if (own.busy) {
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      multiply_units(table, now, at, own, columns.n_chunks(), then, n_then,
                     shared - chunk_0 * Record<NB>::BYTES, lane, acc);
      store_sums(to + warp * 16 * NB, acc, lane);
    } else if (more) {
      load_unit(now, then, n_then, lane);
    }
    at = then;
    __syncthreads();
    // complete results, or partial ones of the splits of a part
    const int n = n_pairs, added = columns.parts > 1 ? 1 : own.per_item, apart = own.per_item / added;
    for (int r = threadIdx.x; r < columns.at_once() * apart * 16 * n; r += 32 * WARPS) {
      const int row = r % 16, token = r / 16 % n, from = r / (16 * n);  // the tile's or the warp's
      const int matrix_row = (item.group * columns.at_once() + from / apart) * 16 + row;
      if (matrix_row >= n_rows) continue;
      const float v = sum_of_warps(to + from * added * 16 * NB + row * NB + token, added);
      const int split = columns.parts > 1 ? item.part * apart + from % apart : 0;
      const i64 at = (i64)pairs[token] * (columns.parts > 1 ? SPLITS : 1) + split;
      (item.is_shared ? shared_expert.results : experts.results)[at * n_rows + matrix_row] =
          columns.parts > 1 ? v : __fmul_rn(v, OUT);
    }
    item = next, own = next_own;
  }

  const int n_contributions = plan->n * own_columns.parts + (has_shared ? all_columns.parts : 0);
  if (n_contributions == 0) {  // no active expert on this device
    for (int tile = blockIdx.x * WARPS + warp; tile < n_tiles; tile += gridDim.x * WARPS)
      sums.finish(experts, shared_expert, tile, n_tokens, n_rows);
    return;
  }
  __threadfence();
  for (int first = 0; first < (end - start) * WARPS; first += 32 * WARPS) {
    __syncthreads();
    if (threadIdx.x == 0) n_ready = 0;
    __syncthreads();
    const int i = start + (first + (int)threadIdx.x) / WARPS, j = threadIdx.x % WARPS;
    if (i < end) {
      const Item mine = item_at(i);
      const int at_once = columns_of(mine).at_once();
      const int tile = mine.group * at_once + j;
      if (j < at_once && tile < n_tiles && atomicAdd(arrived + tile, 1) == n_contributions - 1) {
        arrived[tile] = 0;
        ready[atomicAdd(&n_ready, 1)] = tile;
      }
    }
    __syncthreads();
    __threadfence();
    for (int r = warp; r < n_ready; r += WARPS)
      sums.finish(experts, shared_expert, ready[r], n_tokens, n_rows);
  }
}

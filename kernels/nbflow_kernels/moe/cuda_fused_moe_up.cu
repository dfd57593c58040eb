// Fused MoE, first kernel: norm, router, top-k routing, and the gated up projections of the active experts,
// for up to 8 tokens.
//
// The first thread blocks are routers: each computes 16 logits of every token, and the last one to finish
// routes the tokens, writes the plan and exits.  The others stage the tokens, wait for the plan, and share
// the row tiles of the gate and up projections of the active experts and of the shared expert.  Tickets are
// drawn in the order in which thread blocks start, and only higher tickets wait for lower ones, so there is
// progress however few thread blocks are resident.
//
// All tokens are columns of one MMA operand whatever their experts, so they are staged once.
#include "activation/functions.cuh"
#include "moe/cuda_active_experts.cuh"
#include "moe/cuda_router_gemm.cuh"
#include "moe/cuda_topk_routing.cuh"
#include "moe/cuda_tile_scheduler.cuh"
#include "quantized_matmul/cuda_prologue_norm.cuh"

#if NORM
#define NORM_PARAMETER Norm norm,
#else
#define NORM_PARAMETER
#endif

struct Router {
  const void* weights;       // (E, K)
  const float* shared_gate;  // (K), gate of the shared expert, or null
  float *logits, *weights_of_pairs, *shared_factors;
  int* ids;
};

// Counters between thread blocks, zero before and after the kernel.
struct State {
  int started, arrived, finished;
  u32 plan_ready;
};

struct Matrices {
  const u8 *gate, *up;
  float* hidden;  // (pairs or tokens, width)
  i64 bytes;      // of a matrix
  int width;      // rows
  int shift;      // first row of `up` in its row tile
};

DEV void store_release(u32* at) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(1) : "memory");
}

DEV bool load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value != 0;
}

struct Rows {
  const float* x;
  i64 stride;
  int n, n_columns;
  const float *means, *factors;

  DEV_METHOD const float* row(int token) const { return x + token * stride; }

  // Columns k to k + 3 of a token, normalized.
  DEV_METHOD float4 normalized_four(int token, int k, const Norm& norm) const {
    const float4 v = load_four(row(token), k, n_columns, is_wide(row(token)));
#if NORM
    return normalized<NORM>(v, k, n_columns, norm.scaling, norm.offset, means[token], factors[token]);
#else
    return v;
#endif
  }
};

// Write tokens from `first` on, normalized, to shared memory.
DEV Tokens load_normalized(const Rows& x, const Norm& norm, int first, float* rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int n_chunks = (x.n_columns + CHUNK - 1) / CHUNK, stride = n_chunks * CHUNK;
  const int n = min(NB, x.n - first), width = x.n_columns;
  __syncthreads();
  for (int i = warp; i < n * n_chunks; i += WARPS) {
    const int token = i % n, k = i / n * CHUNK + 4 * lane;
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (k < width) v = x.normalized_four(first + token, k, norm);
    v.y = k + 1 < width ? v.y : 0.0f, v.z = k + 2 < width ? v.z : 0.0f, v.w = k + 3 < width ? v.w : 0.0f;
    *(float4*)(rows + token * stride + k) = v;
  }
  __syncthreads();
  return {rows, stride, n, width};
}

// Logits 16 * `part` to + 15 of all tokens; the last thread block routes all tokens and writes the plan.
DEV void run_router(
    int part, int n_parts, const Rows& x, const Norm& norm, const Router& router,
    const Routing& routing, Plan* plan, State* state, int first_expert, int n_experts, u8* shared) {
  __shared__ float scratch[8];
  const int warp = threadIdx.x >> 5;
  for (int first = 0; first < x.n; first += NB) {
    const Tokens tokens = load_normalized(x, norm, first, (float*)shared);
    float* logits_scratch = (float*)shared + tokens.n * tokens.stride;
    multiply_router<ROUTER>(router.weights, tokens, 16 * part, routing.E,
                            router.logits + first * routing.E, logits_scratch);
    for (int n = 0; part == 0 && n < tokens.n; n++) {
      float* out = norm.scaling.out;  // later kernels read it
      for (int k = threadIdx.x; out != nullptr && k < x.n_columns; k += 32 * WARPS)
        out[(first + n) * norm.scaling.out_stride + k] = tokens.row(n)[k];
      if (router.shared_gate == nullptr) continue;
      const float factor = gate_factor(tokens.row(n), router.shared_gate, x.n_columns, scratch);
      if (threadIdx.x == 0) router.shared_factors[first + n] = factor;
    }
  }
  if (!last_to_arrive(&state->arrived, n_parts)) return;
  double* scores = (double*)shared;
  float* logits = (float*)(scores + x.n * routing.scratch_size());
  for (int i = threadIdx.x; i < x.n * routing.E; i += 32 * WARPS)  // __ldcg bypasses L1, which is not coherent
    logits[i] = __ldcg(router.logits + i);
  __syncthreads();
  if (warp < x.n)
    route(routing, logits + warp * routing.E, router.weights_of_pairs + warp * routing.k,
          router.ids + warp * routing.k, scores + warp * routing.scratch_size());
  __syncthreads();
  make_plan(plan, router.ids, x.n, routing.k, first_expert, n_experts);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(&state->plan_ready);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) experts_up(
    const float* x, i64 x_stride, NORM_PARAMETER Router router, Routing routing, Matrices experts,
    Matrices shared_expert, Plan* plan, State* state, i64 tile_bytes, int n_tokens, int n_columns,
    int n_routers, int first_expert, int n_experts, int padding) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ float means[MAX_TOKENS], factors[MAX_TOKENS];
  __shared__ int ticket;
#if !NORM
  const Norm norm = {};
#endif
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) ticket = atomicAdd(&state->started, 1);
  __syncthreads();
  const int number = ticket;
  const Rows rows = {x, x_stride, n_tokens, n_columns, means, factors};
#if NORM
  norm_statistics<NORM>([&](int n) { return rows.row(n); }, n_tokens, n_columns, norm.eps, (float*)shared,
                     means, factors);
#endif
  if (number < n_routers) {
    run_router(number, n_routers, rows, norm, router, routing, plan, state, first_expert, n_experts,
               shared);
    return;
  }
  const Columns columns = {n_columns, 1};
  const int n_chunks = columns.n_chunks();
  const int n_workers = gridDim.x - n_routers, worker = number - n_routers;
  const int sums_at = n_chunks * Record<NB>::BYTES;
  Table table;
  table.load(n_columns >> 31, lane);

  for (int token_0 = 0; token_0 < n_tokens; token_0 += NB) {
    __syncthreads();
    for (int i = warp; i < n_chunks * NB; i += WARPS) {
      const int n = token_0 + i % NB, chunk = i / NB;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (n < n_tokens) v = rows.normalized_four(n, chunk * CHUNK + 4 * lane, norm);
      stage<NB>(v, shared + chunk * Record<NB>::BYTES, i % NB, lane);
    }
    if (token_0 == 0 && threadIdx.x == 0)
      while (!load_acquire(&state->plan_ready)) __nanosleep(32);
    __syncthreads();

    // Work items: groups of row tiles of the shared expert, then of the active experts.
    const int of_shared = columns.n_groups(shared_expert.width);
    const int of_expert = columns.n_groups(experts.width);
    const int n_items = of_shared + plan->n * of_expert;
    const int end = (int)((i64)(worker + 1) * n_items / n_workers);
    const WarpWork own = columns.own(0, warp);
    auto is_shared = [&](int item) { return item < of_shared; };
    auto active_at = [&](int item) { return plan->active + (item - of_shared) / of_expert; };
    auto group_at = [&](int item) { return is_shared(item) ? item : (item - of_shared) % of_expert; };
    // this warp's first unit of an item; part 0 is the gate, 1 and 2 are row tiles of `up`
    auto units_at = [&](int item, int part) {
      const bool shared_item = is_shared(item);
      const u8* base = shared_item ? part ? shared_expert.up : shared_expert.gate
                              : part ? experts.up : experts.gate;
      if (!shared_item) base += active_at(item)->expert * experts.bytes;
      const int width = shared_item ? shared_expert.width : experts.width;
      const int last = ((shared_item && part ? shared_expert.shift : 0) + width - 1) / 16;  // last row tile
      const int tile = min(group_at(item) * columns.at_once() + own.tile + part / 2, last);
      return base + tile * tile_bytes + own.unit_0 * (i64)UNIT_BYTES;
    };
    auto next_item = [&](int item) {  // that has a token of this batch
      for (; item < end && !is_shared(item); item++) {
        const ActiveExpert* c = active_at(item);
        for (int n = token_0; n < min(token_0 + NB, n_tokens); n++)
          if (c->pairs[n] >= 0) return item;
      }
      return item;
    };
    int item = next_item((int)((i64)worker * n_items / n_workers)), turn = 0;
    Unit now;
    const u8* at = nullptr;
    if (item < end && own.busy) {
      at = units_at(item, 0);
      load_unit(now, at, n_chunks - 2 * own.unit_0, lane);
    }
    while (item < end) {
      const int next = next_item(item + 1);
      const int n_parts = is_shared(item) && shared_expert.shift ? 3 : 2;
      float* sums = (float*)(shared + sums_at) + (turn ^= 1) * 3 * WARPS * 16 * NB;  // double buffer
      for (int part = 0; own.busy && part < n_parts; part++) {
        const u8* then = part + 1 < n_parts ? units_at(item, part + 1)
                         : next < end       ? units_at(next, 0) : at;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_units(table, now, at, own, n_chunks, then, n_chunks - 2 * own.unit_0, shared, lane,
                       acc);
        store_sums(sums + (part * WARPS + warp) * 16 * NB, acc, lane);
        at = then;
      }
      __syncthreads();
      float* hidden = is_shared(item) ? shared_expert.hidden : experts.hidden;
      const int width = is_shared(item) ? shared_expert.width : experts.width;
      const int shift = is_shared(item) ? shared_expert.shift : 0;
      const int row_0 = group_at(item) * columns.at_once() * 16, n = min(NB, n_tokens - token_0);
      for (int i = threadIdx.x; i < columns.at_once() * 16 * n; i += 32 * WARPS) {
        const int row = i % 16, token = i / 16 % n, tile = i / (16 * n);
        const int column = row_0 + 16 * tile + row;
        const int pair = is_shared(item) ? token_0 + token : active_at(item)->pairs[token_0 + token];
        if (pair < 0 || column >= width) continue;
        auto result = [&](int part, int row) {
          const float* from = sums + (part * WARPS + tile * own.per_item) * 16 * NB + row * NB + token;
          return __fmul_rn(sum_of_warps(from, own.per_item), OUT);
        };
        const int other = row + shift;
        hidden[(i64)pair * width + column] =
            FUNCTION::of(result(0, row)) * result(1 + other / 16, other % 16);
      }
      item = next;
    }
  }
  if (threadIdx.x == 0 && atomicAdd(&state->finished, 1) == n_workers - 1) {
    state->started = 0, state->finished = 0, state->plan_ready = 0;
  }
}

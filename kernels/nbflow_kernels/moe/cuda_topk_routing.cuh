// Top-k routing, a warp per token, in float64 as on the CPU; sigmoid gate of the shared expert.
#pragma once
#include "cuda/block_reduce.cuh"
#include "cuda/types.cuh"

struct Routing {
  const float* bias;  // added to the scores for the choice, or null
  int E, k, sigmoid, renormalize, n_groups, top_k_groups, top2_sum;
  float scale, min_score, mixer_margin;

  DEV_METHOD int scratch_size() const { return 2 * E + n_groups; }  // doubles that `route` needs
};

// Largest value and its index on all lanes; the first among equals.
struct Best {
  double value;
  int index;
};

DEV Best argmax(const double* values, int first, int stop) {
  Best b = {-infinity64(), 0x7fffffff};
  for (int i = first + (threadIdx.x & 31); i < stop; i += 32)
    if (values[i] > b.value) b = {values[i], i};
  for (int mask = 16; mask; mask /= 2) {
    const double value = __shfl_xor_sync(0xffffffffu, b.value, mask);
    const int index = __shfl_xor_sync(0xffffffffu, b.index, mask);
    if (value > b.value || (value == b.value && index < b.index)) b = {value, index};
  }
  return b;
}

// Compute the scores of a token; returns false if it has a NaN or +inf, or only -inf.
DEV bool score(const float* logits, int E, bool sigmoid, double* scores) {
  float top = -infinity();
  bool bad = false;
  for (int e = threadIdx.x & 31; e < E; e += 32) {
    bad |= !(logits[e] < infinity());
    top = fmaxf(top, logits[e]);
  }
  top = reduce_lanes<32>(top, Max());
  if (__any_sync(0xffffffffu, bad) || top == -infinity()) return false;
  double total = 0.0;
  for (int e = threadIdx.x & 31; e < E; e += 32) {
    scores[e] = sigmoid ? 1.0 / (1.0 + exp(-(double)logits[e])) : exp((double)logits[e] - top);
    total += scores[e];
  }
  total = reduce_lanes<32>(total, Sum());
  if (!sigmoid)
    for (int e = threadIdx.x & 31; e < E; e += 32) scores[e] /= total;
  __syncwarp();
  return true;
}

// Set the choice scores of experts outside the best groups to -inf.
DEV void drop_groups(
    double* choice, int E, int n_groups, int top_k_groups, bool top2_sum, double* groups) {
  const int size = E / n_groups;
  for (int g = 0; g < n_groups; g++) {
    const Best first = argmax(choice, g * size, (g + 1) * size);
    double value = first.value;
    if (top2_sum && value > -infinity64())
      value += fmax(argmax(choice, g * size, first.index).value,
                    argmax(choice, first.index + 1, (g + 1) * size).value);
    if ((threadIdx.x & 31) == 0) groups[g] = value;
  }
  __syncwarp();
  for (int i = 0; i < top_k_groups; i++) {
    const Best b = argmax(groups, 0, n_groups);
    __syncwarp();
    if ((threadIdx.x & 31) == 0 && b.value > -infinity64()) groups[b.index] = nan64();  // chosen
    __syncwarp();
  }
  for (int e = threadIdx.x & 31; e < E; e += 32)
    if (groups[e / size] == groups[e / size]) choice[e] = -infinity64();
  __syncwarp();
}

// SparseMixer: the softmax of an expert among those left whose logits are near its own, on all lanes.
DEV double mixed_score(
    const float* logits, const double* choice, int E, int chosen, double margin) {
  const double largest = logits[chosen];
  double total = 0.0;
  for (int e = threadIdx.x & 31; e < E; e += 32) {
    const double logit = logits[e];
    if (choice[e] > -infinity64() && largest - logit <= margin * fmax(fabs(logit), largest))
      total += exp(logit - largest);
  }
  return 1.0 / reduce_lanes<32>(total, Sum());
}

// Write the weights and ids of the k experts of a token.
DEV void route(const Routing& r, const float* logits, float* weights, int* ids, double* scratch) {
  const int lane = threadIdx.x & 31;
  double *scores = scratch, *choice = scratch + r.E, *groups = scratch + 2 * r.E;
  if (!score(logits, r.E, r.sigmoid, scores)) {
    for (int j = lane; j < r.k; j += 32) weights[j] = nan32(), ids[j] = -1;
    return;
  }
  for (int e = lane; e < r.E; e += 32)
    choice[e] = logits[e] == -infinity() ? -infinity64() : scores[e] + (r.bias ? r.bias[e] : 0.0f);
  __syncwarp();
  if (r.n_groups > 1) drop_groups(choice, r.E, r.n_groups, r.top_k_groups, r.top2_sum, groups);
  double total = 0.0;
  for (int j = 0; j < r.k; j++) {
    const Best b = argmax(choice, 0, r.E);
    if (r.mixer_margin > 0.0f && b.value > -infinity64()) {
      const double mixed = mixed_score(logits, choice, r.E, b.index, (double)r.mixer_margin);
      if (lane == 0) scores[b.index] = mixed;
      __syncwarp();
    }
    const bool used = b.value > -infinity64() && scores[b.index] >= (double)r.min_score;
    if (used) total += scores[b.index];
    __syncwarp();
    if (lane == 0) {
      ids[j] = used ? b.index : -1;
      if (b.value > -infinity64()) choice[b.index] = -infinity64();
    }
    __syncwarp();
  }
  const double factor = r.renormalize && total > 0.0 ? r.scale / total : (double)r.scale;
  for (int j = lane; j < r.k; j += 32)
    weights[j] = ids[j] >= 0 ? (float)(scores[ids[j]] * factor) : 0.0f;
}

// Sigmoid gate of the shared expert: sigmoid(x . gate); by 256 threads.
DEV float gate_factor(const float* x, const float* gate, int width, float* scratch) {
  float total = 0.0f;
  for (int d = threadIdx.x; d < width; d += 256) total = fmaf(x[d], gate[d], total);
  total = reduce_block<256>(total, Sum(), scratch);
  return 1.0f / (1.0f + expf(-total));
}

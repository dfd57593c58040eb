// RoPE rotation of a pair with fixed rounding, shared by all kernels that rotate.
#pragma once

__device__ __forceinline__ void rotate_pair(float& x, float& y, float c, float s) {
  const float turned = __fmaf_rn(x, c, __fmul_rn(y, -s));
  y = __fmaf_rn(y, c, __fmul_rn(x, s));
  x = turned;
}

// The rotation of a pair, spelled out: the same bits wherever vectors are turned.
#pragma once

__device__ __forceinline__ void turn(float& x, float& y, float c, float s) {
  const float turned = __fmaf_rn(x, c, __fmul_rn(y, -s));
  y = __fmaf_rn(y, c, __fmul_rn(x, s));
  x = turned;
}

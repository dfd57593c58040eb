// Numbers that have no literal; NVRTC comes without <math.h>.
#pragma once

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float nan32() { return __int_as_float(0x7fffffff); }
__device__ inline double infinity64() { return __longlong_as_double(0x7ff0000000000000LL); }
__device__ inline double nan64() { return __longlong_as_double(0x7fffffffffffffffLL); }

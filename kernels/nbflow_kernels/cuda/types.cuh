// Short type names, the attributes of device functions, and infinity and NaN (NVRTC has no <math.h>).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__
#define DEV_METHOD DEV

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float nan32() { return __int_as_float(0x7fffffff); }
__device__ inline double infinity64() { return __longlong_as_double(0x7ff0000000000000LL); }
__device__ inline double nan64() { return __longlong_as_double(0x7fffffffffffffffLL); }

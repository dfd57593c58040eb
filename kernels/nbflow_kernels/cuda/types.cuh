// Short names for types and for what every device function is declared with.
#pragma once
#include "cuda/numbers.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__
#define DEV_METHOD DEV

// The grid barrier of cooperative groups, as CUDA C++ spells it.
#include <cooperative_groups.h>

extern "C" __global__ void grid_barrier(int* x, int* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    x[i] = i;
    cooperative_groups::this_grid().sync();
    y[i] = x[n - 1 - i];
}

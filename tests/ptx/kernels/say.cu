// printf and assert.

extern "C" __global__ void say(const float* x, int n) {
    if (threadIdx.x < 2) printf("thread %d of %s: %.3f %5u|%llx|%c%%\n", threadIdx.x, "two", x[threadIdx.x], 7u, 255ull, 'z');
    assert(x[threadIdx.x] > 0.0f);
}

// The sum of two vectors, and the same with a grid of one's choice, for studies of launch configurations.
#include "vector.cuh"

namespace optexp {

template <typename T, int N>
__global__ void add_forward(const T* a, const T* b, T* y, int64_t size) {
    transform<N>(size, [](float left, float right) { return left + right; }, y, a, b);
}

// As first taught: each thread takes every so-many-th element.
template <typename T>
__global__ void add_strided(const T* a, const T* b, T* y, int64_t size) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
        y[i] = T(float(a[i]) + float(b[i]));
    }
}

}  // namespace optexp

using namespace optexp;

extern "C" int forward(const void* a, const void* b, void* y, int64_t size, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(a, b, y), [&](auto n) {
            constexpr int N = decltype(n)::value;
            launch_with_pdl(add_forward<T, N>, blocks(size, N), PACKS, 0, stream, a, b, y, size);
        });
    });
}

extern "C" int strided(
    const void* a, const void* b, void* y, int64_t size, int64_t grid, int64_t block, int64_t type,
    cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        add_strided<T><<<unsigned(grid), unsigned(block), 0, stream>>>((const T*)a, (const T*)b, (T*)y, size);
    });
}

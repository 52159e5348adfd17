// ReLU, in place where y is x, and its gradient from the result.
#include "vector.cuh"

namespace optexp {

// y may be x: each thread reads its elements before it writes them. Comparing this way lets NaN through.
template <typename T, int N>
__global__ void relu_forward(const T* x, T* y, int64_t size) {
    transform<N>(size, [](float v) { return v <= 0.0f ? 0.0f : v; }, y, x);
}

template <typename T, int N>
__global__ void relu_backward(const T* dy, const T* y, T* dx, int64_t size) {
    transform<N>(size, [](float g, float v) { return v <= 0.0f ? 0.0f : g; }, dx, dy, y);
}

}  // namespace optexp

using namespace optexp;

extern "C" int forward(const void* x, void* y, int64_t size, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(x, y), [&](auto n) {
            constexpr int N = decltype(n)::value;
            launch_with_pdl(relu_forward<T, N>, blocks(size, N), PACKS, 0, stream, x, y, size);
        });
    });
}

extern "C" int backward(const void* dy, const void* y, void* dx, int64_t size, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(dy, y, dx), [&](auto n) {
            constexpr int N = decltype(n)::value;
            launch_with_pdl(relu_backward<T, N>, blocks(size, N), PACKS, 0, stream, dy, y, dx, size);
        });
    });
}

// GELU and its gradient: each element is read and written once.
#include "vector.cuh"

namespace optexp {

// The quotient is the quick one, which is 0 where its divisor is beyond 2^126: so is Φ there.
template <bool TANH>
__device__ float cdf(float x) {
    if (TANH) return __fdividef(1.0f, 1.0f + __expf(-1.5957691216057308f * x * (1.0f + 0.044715f * x * x)));
    return 0.5f * (1.0f + erff(0.7071067811865476f * x));
}

template <bool TANH>
__device__ float derivative(float x) {
    const float p = cdf<TANH>(x);
    if (TANH) return p + x * p * (1.0f - p) * 1.5957691216057308f * (1.0f + 0.134145f * x * x);
    return p + x * 0.3989422804014327f * __expf(-0.5f * x * x);
}

template <typename T, int N, bool TANH>
__global__ void gelu_forward(const T* x, T* y, int64_t size) {
    transform<N>(size, [](float v) { return v * cdf<TANH>(v); }, y, x);
}

template <typename T, int N, bool TANH>
__global__ void gelu_backward(const T* dy, const T* x, T* dx, int64_t size) {
    transform<N>(size, [](float g, float v) { return g * derivative<TANH>(v); }, dx, dy, x);
}

}  // namespace optexp

using namespace optexp;

extern "C" int forward(const void* x, void* y, int64_t size, int64_t tanh, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(x, y), [&](auto n) {
            constexpr int N = decltype(n)::value;
            const auto kernel = tanh ? gelu_forward<T, N, true> : gelu_forward<T, N, false>;
            launch_with_pdl(kernel, blocks(size, N), PACKS, 0, stream, x, y, size);
        });
    });
}

extern "C" int backward(
    const void* dy, const void* x, void* dx, int64_t size, int64_t tanh, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(dy, x, dx), [&](auto n) {
            constexpr int N = decltype(n)::value;
            const auto kernel = tanh ? gelu_backward<T, N, true> : gelu_backward<T, N, false>;
            launch_with_pdl(kernel, blocks(size, N), PACKS, 0, stream, dy, x, dx, size);
        });
    });
}

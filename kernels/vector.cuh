// What the CUDA kernels share: 16-byte accesses, arithmetic in float, and the choice of a type at run time.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "pdl.cuh"

namespace optexp {

constexpr int PACKS = 512;  // of a block: one a thread

// N values that are read or written at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T values[N];
};

template <int N, typename T>
__device__ Pack<T, N> load(const T* from, int64_t pack) {
    return reinterpret_cast<const Pack<T, N>*>(from)[pack];
}

template <int N, typename T>
__device__ void store(T* to, int64_t pack, const Pack<T, N>& values) {
    reinterpret_cast<Pack<T, N>*>(to)[pack] = values;
}

template <int N, typename F, typename T, typename... X>
__device__ Pack<T, N> combine(F f, const Pack<X, N>&... x) {
    Pack<T, N> y;
#pragma unroll
    for (int i = 0; i < N; i++) y.values[i] = T(f(float(x.values[i])...));
    return y;
}

// A kernel that makes y = f(x...) of every element, N at once, and one by one what is left at the end. y may be one of x.
template <int N, typename F, typename T, typename... X>
__device__ void transform(int64_t size, F f, T* y, const X*... x) {
    begin();
    const int64_t packs = size / N, pack = int64_t(blockIdx.x) * PACKS + threadIdx.x;
    if (pack < packs) {
        store<N>(y, pack, combine<N, F, T>(f, load<N>(x, pack)...));
    } else if (pack - packs < size - packs * N) {
        const int64_t last = packs * N + pack - packs;
        y[last] = T(f(float(x[last])...));
    }
}

// Blocks for `transform`.
inline unsigned blocks(int64_t size, int n) {
    const int64_t work = size / n + size % n;
    return unsigned((work + PACKS - 1) / PACKS);
}

template <typename... P>
bool aligned(const P*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Calls f with a value of the type that Python's number stands for.
template <typename F>
int with_type(int64_t type, F f) {
    switch (type) {
        case 0: f(float()); break;
        case 1: f(__half()); break;
        case 2: f(__nv_bfloat16()); break;
        default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

// Calls f with the number of elements that are accessed at once: 16 bytes of them, or one where memory is not aligned.
template <typename T, typename F>
void with_width(bool aligned, F f) {
    if (aligned) {
        f(std::integral_constant<int, 16 / sizeof(T)>());
    } else {
        f(std::integral_constant<int, 1>());
    }
}

// The sum over a block, for all of its threads; `scratch` holds one value for each warp.
__device__ inline float block_sum(float value, float* scratch) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    __syncthreads();  // all reads of the last sum are done
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += scratch[warp];
    return total;
}

}  // namespace optexp

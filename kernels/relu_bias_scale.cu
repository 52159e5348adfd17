// (relu(x) + bias)·scale, and its gradients. A thread owns N neighbouring columns and goes down its share of the rows.
#include "vector.cuh"

namespace optexp {

constexpr int WARPS = 8;  // of a block: each takes other rows of the same columns

// The rows of this thread: from `first` on, every `step`-th.
struct Rows {
    int64_t first, step;
    __device__ Rows() : first(int64_t(blockIdx.y) * WARPS + threadIdx.y), step(int64_t(gridDim.y) * WARPS) {}
};

template <typename T, int N>
__global__ void relu_bias_scale_forward(
    const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t rows, int64_t columns, float scale) {
    const int64_t pack = int64_t(blockIdx.x) * 32 + threadIdx.x, packs = columns / N;
    if (pack >= packs) return;
    const auto offsets = load<N>(bias, pack);
    const Rows mine;
    for (int64_t row = mine.first; row < rows; row += 4 * mine.step) {
        Pack<T, N> values[4];  // all on their way before the first is written
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (row + j * mine.step < rows) values[j] = load<N>(x, (row + j * mine.step) * packs + pack);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (row + j * mine.step >= rows) break;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float v = float(values[j].values[i]);
                values[j].values[i] = T(((v <= 0.0f ? 0.0f : v) + float(offsets.values[i])) * scale);
            }
            store<N>(y, (row + j * mine.step) * packs + pack, values[j]);
        }
    }
}

// dx, and for each row of blocks the sums over its rows of what arrives at the bias.
template <typename T, int N>
__global__ void relu_bias_scale_backward(
    const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, float* __restrict__ sums, int64_t rows,
    int64_t columns, float scale) {
    __shared__ float shared[WARPS][32 * N];
    const int64_t pack = int64_t(blockIdx.x) * 32 + threadIdx.x, packs = columns / N;
    float total[N] = {};
    const Rows mine;
    if (pack < packs) {
        for (int64_t row = mine.first; row < rows; row += 2 * mine.step) {
            Pack<T, N> arrived[2], values[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (row + j * mine.step >= rows) break;
                arrived[j] = load<N>(dy, (row + j * mine.step) * packs + pack);
                values[j] = load<N>(x, (row + j * mine.step) * packs + pack);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (row + j * mine.step >= rows) break;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float g = float(arrived[j].values[i]) * scale;
                    total[i] += g;
                    arrived[j].values[i] = T(float(values[j].values[i]) <= 0.0f ? 0.0f : g);
                }
                store<N>(dx, (row + j * mine.step) * packs + pack, arrived[j]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) shared[threadIdx.y][i * 32 + threadIdx.x] = total[i];
    __syncthreads();
    for (int i = threadIdx.y; i < N; i += WARPS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; warp++) sum += shared[warp][i * 32 + threadIdx.x];
        if (pack < packs) sums[blockIdx.y * columns + pack * N + i] = sum;
    }
}

}  // namespace optexp

using namespace optexp;

extern "C" int forward(
    const void* x, const void* bias, void* y, int64_t rows, int64_t columns, int64_t groups, double scale, int64_t type,
    cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(x, bias, y) && columns * sizeof(T) % 16 == 0, [&](auto n) {
            constexpr int N = decltype(n)::value;
            const dim3 grid(unsigned((columns / N + 31) / 32), unsigned(groups)), block(32, WARPS);
            relu_bias_scale_forward<T, N><<<grid, block, 0, stream>>>(
                (const T*)x, (const T*)bias, (T*)y, rows, columns, float(scale));
        });
    });
}

extern "C" int backward(
    const void* dy, const void* x, void* dx, void* sums, int64_t rows, int64_t columns, int64_t groups, double scale,
    int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(dy, x, dx) && columns * sizeof(T) % 16 == 0, [&](auto n) {
            constexpr int N = decltype(n)::value;
            const dim3 grid(unsigned((columns / N + 31) / 32), unsigned(groups)), block(32, WARPS);
            relu_bias_scale_backward<T, N><<<grid, block, 0, stream>>>(
                (const T*)dy, (const T*)x, (T*)dx, (float*)sums, rows, columns, float(scale));
        });
    });
}

// (relu(x) + bias)·scale, and its gradients. A thread owns N neighbouring columns and goes down its share of the rows.
#include "vector.cuh"

namespace optexp {

constexpr int WARPS = 8;  // of a block: each takes other rows of the same columns

// The rows of this thread: from `first` on, every `step`-th.
struct Rows {
    int64_t first, step;
    __device__ Rows() : first(int64_t(blockIdx.y) * WARPS + threadIdx.y), step(int64_t(gridDim.y) * WARPS) {}
};

// Loads that may move behind stores, as those of what is called __restrict__ may, are moved there, to spare registers, and
// each then waits for the one before it.
template <typename T, int N>
__global__ void relu_bias_scale_forward(const T* x, const T* bias, T* y, int64_t rows, int64_t columns, float scale) {
    begin();
    const int64_t pack = int64_t(blockIdx.x) * 32 + threadIdx.x, packs = columns / N;
    if (pack >= packs) return;
    const auto offsets = load<N>(bias, pack);
    const auto finish = [&](Pack<T, N> values, int64_t place) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float v = float(values.values[i]);
            values.values[i] = T(((v <= 0.0f ? 0.0f : v) + float(offsets.values[i])) * scale);
        }
        store<N>(y, place, values);
    };
    const Rows mine;
    const int64_t step = mine.step * packs, end = rows * packs;
    int64_t place = mine.first * packs + pack;
    for (; place + 3 * step < end; place += 4 * step) {  // all four are on their way before the first is written
        const auto a = load<N>(x, place), b = load<N>(x, place + step);
        const auto c = load<N>(x, place + 2 * step), d = load<N>(x, place + 3 * step);
        finish(a, place);
        finish(b, place + step);
        finish(c, place + 2 * step);
        finish(d, place + 3 * step);
    }
    for (; place < end; place += step) finish(load<N>(x, place), place);
}

// dx, and for each row of blocks the sums over its rows of what arrives at the bias.
template <typename T, int N, typename S>
__global__ void relu_bias_scale_backward(
    const T* dy, const T* x, T* dx, S* sums, int64_t rows, int64_t columns, float scale) {
    __shared__ float shared[WARPS][32 * N];
    begin();
    const int64_t pack = int64_t(blockIdx.x) * 32 + threadIdx.x, packs = columns / N;
    float total[N] = {};
    const auto finish = [&](Pack<T, N> arrived, const Pack<T, N>& values, int64_t place) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float g = float(arrived.values[i]) * scale;
            total[i] += g;
            arrived.values[i] = T(float(values.values[i]) <= 0.0f ? 0.0f : g);
        }
        store<N>(dx, place, arrived);
    };
    const Rows mine;
    const int64_t step = mine.step * packs, end = pack < packs ? rows * packs : 0;
    int64_t place = mine.first * packs + pack;
    for (; place + step < end; place += 2 * step) {
        const auto arrived = load<N>(dy, place), later = load<N>(dy, place + step);
        const auto values = load<N>(x, place), others = load<N>(x, place + step);
        finish(arrived, values, place);
        finish(later, others, place + step);
    }
    if (place < end) finish(load<N>(dy, place), load<N>(x, place), place);
#pragma unroll
    for (int i = 0; i < N; i++) shared[threadIdx.y][i * 32 + threadIdx.x] = total[i];
    __syncthreads();
    for (int i = threadIdx.y; i < N; i += WARPS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; warp++) sum += shared[warp][i * 32 + threadIdx.x];
        if (pack < packs) sums[blockIdx.y * columns + pack * N + i] = S(sum);
    }
}

// The sums of all rows of blocks added up, always in the same order.
template <typename T>
__global__ void add_up(const float* sums, T* total, int64_t groups, int64_t columns) {
    __shared__ float shared[WARPS][32];
    begin();
    const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (int64_t group = threadIdx.y; group < groups; group += WARPS) sum += sums[group * columns + column];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    for (int warp = 1; warp < WARPS; warp++) sum += shared[warp][threadIdx.x];
    total[column] = T(sum);
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
            launch_with_pdl(relu_bias_scale_forward<T, N>, grid, block, 0, stream, x, bias, y, rows, columns, scale);
        });
    });
}

// sums:  room for those of each group, where there are several
extern "C" int backward(
    const void* dy, const void* x, void* dx, void* sums, void* total, int64_t rows, int64_t columns, int64_t groups,
    double scale, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_width<T>(aligned(dy, x, dx) && columns * sizeof(T) % 16 == 0, [&](auto n) {
            constexpr int N = decltype(n)::value;
            const dim3 grid(unsigned((columns / N + 31) / 32), unsigned(groups)), block(32, WARPS);
            const auto sum = [&](auto kernel, void* to) {
                launch_with_pdl(kernel, grid, block, 0, stream, dy, x, dx, to, rows, columns, scale);
            };
            if (groups == 1) return sum(relu_bias_scale_backward<T, N, T>, total);
            sum(relu_bias_scale_backward<T, N, float>, sums);
            launch_with_pdl(add_up<T>, unsigned((columns + 31) / 32), block, 0, stream, sums, total, groups, columns);
        });
    });
}

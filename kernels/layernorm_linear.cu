// The norm in front of a GEMM: rows are read once, kept in shared memory, and written as the GEMM wants them.
#include "vector.cuh"

namespace optexp {

constexpr int MOST_WARPS = 32;

__device__ void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// One row a block. The variance is that of the differences from the mean: a large mean costs nothing.
template <typename T, typename R, typename P, int N>
__global__ void normalise(
    const T* x, const P* gamma, const P* beta, R* y, float* means, float* scales, int columns, float eps) {
    constexpr int V = N < 16 / int(sizeof(P)) ? N : 16 / int(sizeof(P));  // parameters that are read at once
    extern __shared__ float row[];
    __shared__ float scratch[MOST_WARPS];
    begin();
    x += int64_t(blockIdx.x) * columns;
    y += int64_t(blockIdx.x) * columns;
    float sum = 0.0f;
    for (int pack = threadIdx.x; pack < columns / N; pack += blockDim.x) {
        const auto values = load<N>(x, pack);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float v = float(values.values[i]);
            row[pack * N + i] = v;
            sum += v;
        }
        if (all_at_once()) {  // else others have brought them, and to ask costs more than it saves
            if (gamma != nullptr) prefetch(gamma + pack * N);
            if (beta != nullptr) prefetch(beta + pack * N);
        }
    }
    const float mean = block_sum(sum, scratch) / columns;
    float squares = 0.0f;
    for (int pack = threadIdx.x; pack < columns / N; pack += blockDim.x) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float centred = row[pack * N + i] - mean;
            squares += centred * centred;
        }
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / columns + eps);
    if (threadIdx.x == 0) {
        means[blockIdx.x] = mean;
        scales[blockIdx.x] = scale;
    }
    for (int pack = threadIdx.x; pack < columns / N; pack += blockDim.x) {
        Pack<R, N> values;
#pragma unroll
        for (int i = 0; i < N; i += V) {
            Pack<P, V> factors, offsets;
            if (gamma != nullptr) factors = load<V>(gamma, (pack * N + i) / V);
            if (beta != nullptr) offsets = load<V>(beta, (pack * N + i) / V);
#pragma unroll
            for (int j = 0; j < V; j++) {
                float normal = (row[pack * N + i + j] - mean) * scale;
                if (gamma != nullptr) normal *= float(factors.values[j]);
                if (beta != nullptr) normal += float(offsets.values[j]);
                values.values[i + j] = R(normal);
            }
        }
        store<N>(y, pack, values);
    }
}

// As first taught, norm and GEMM in one kernel: a block normalises a row, then each thread makes outputs of its own.
template <typename T>
__global__ void layernorm_linear_plain(
    const T* x, const float* gamma, const float* beta, const T* weight, const T* bias, T* y, int columns, int outputs,
    float eps) {
    extern __shared__ float row[];
    __shared__ float scratch[MOST_WARPS];
    x += int64_t(blockIdx.x) * columns;
    float sum = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) sum += row[column] = float(x[column]);
    const float mean = block_sum(sum, scratch) / columns;
    float squares = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        squares += (row[column] - mean) * (row[column] - mean);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / columns + eps);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        row[column] = (row[column] - mean) * scale * gamma[column] + beta[column];
    }
    __syncthreads();
    for (int output = threadIdx.x; output < outputs; output += blockDim.x) {
        float total = float(bias[output]);
        for (int column = 0; column < columns; column++) {
            total += row[column] * float(weight[int64_t(output) * columns + column]);
        }
        y[int64_t(blockIdx.x) * outputs + output] = T(total);
    }
}

}  // namespace optexp

using namespace optexp;

namespace {

// Threads for a row: each takes two packs where there are enough, of few rows one, as nothing else is on its way then.
unsigned threads(int64_t rows, int64_t columns, int n) {
    const int64_t together = rows <= 256 ? 32 : 64, warps = (columns / n + together - 1) / together;
    return unsigned(32 * (warps < 1 ? 1 : warps > MOST_WARPS ? MOST_WARPS : warps));
}

template <typename K>
void allow(K kernel, size_t bytes) {
    if (bytes > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

}  // namespace

// gamma, beta:  null where there is none
// parameters:   their type, which is that of x, or float
extern "C" int forward(
    const void* x, const void* gamma, const void* beta, void* y, void* means, void* scales, int64_t rows,
    int64_t columns, double eps, int64_t parameters, int64_t result, int64_t type, cudaStream_t stream) {
    int status = 0;
    const int chosen = with_type(type, [&](auto from) {
        status = with_type(result, [&](auto to) {
            using T = decltype(from);
            using R = decltype(to);
            const bool wide = aligned(x, y, gamma, beta) && columns * sizeof(T) % 16 == 0 && columns * sizeof(R) % 16 == 0;
            const auto run = [&](auto parameter) {
                using P = decltype(parameter);
                with_width<T>(wide, [&](auto n) {
                    constexpr int N = decltype(n)::value;
                    const size_t bytes = columns * sizeof(float);
                    const auto kernel = normalise<T, R, P, N>;
                    allow(kernel, bytes);
                    launch_with_pdl(kernel, unsigned(rows), threads(rows, columns, N), bytes, stream, x, gamma, beta, y, means,
                                 scales, columns, eps);
                });
            };
            parameters == type ? run(from) : run(float());
        });
    });
    return chosen ? chosen : status;
}

extern "C" int plain(
    const void* x, const void* gamma, const void* beta, const void* weight, const void* bias, void* y, int64_t rows,
    int64_t columns, int64_t outputs, double eps, int64_t type, cudaStream_t stream) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const size_t bytes = columns * sizeof(float);
        allow(layernorm_linear_plain<T>, bytes);
        layernorm_linear_plain<T><<<unsigned(rows), 256, bytes, stream>>>(
            (const T*)x, (const float*)gamma, (const float*)beta, (const T*)weight, (const T*)bias, (T*)y, int(columns),
            int(outputs), float(eps));
    });
}

// LayerNorm of a few rows and the product after it in one launch: blocks normalise what they multiply.
//
// Four blocks, a cluster, make a tile of y of 64×64. Each has a quarter of the columns of its rows of x and w, all of which
// are on their way at once; they tell each other mean and squares of their quarters, multiply theirs, and then each adds up
// a quarter of the tile's rows.
#include "hopper.cuh"

namespace optexp::hopper {

constexpr int PARTS = 4, TILE = 64, SLICE = TILE / PARTS;
constexpr int PADDED = TILE + 8;  // floats of a row of sums: a warp's eight rows are in different banks

template <typename T>
struct Rows {
    const T *x, *gamma, *beta, *w, *bias;
    T* y;
    int64_t x_stride, w_stride;
    int m, n, k;
    float share, eps;  // 1/k
};

// What a block keeps in shared memory. A thread's share of a row are so many packs of 8 columns.
template <int PACKS>
struct Layout {
    static constexpr int COLUMNS = PACKS * 32;
    static constexpr int ROW = COLUMNS * 2 + 16;  // bytes: eight rows' packs of the same columns are in different banks
    static constexpr int X = 0, W = X + TILE * ROW, GAMMA = W + TILE * ROW, BETA = GAMMA + COLUMNS * 2;
    static constexpr int SUMS = BETA + COLUMNS * 2, MOMENTS = SUMS + PARTS * SLICE * PADDED * 4;
    static constexpr int BYTES = MOMENTS + TILE * PARTS * 8;
};

// 16 bytes, or as many zeros.
__device__ inline void copy_async(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int STILL>
__device__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STILL) : "memory");
}

// Two floats where `at` lies in another block of the cluster.
__device__ inline void tell(uint32_t at, uint32_t rank, float a, float b) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v2.f32 [remote], {%2, %3};\n}" ::"r"(at),
        "r"(rank), "f"(a), "f"(b)
        : "memory");
}

template <typename T, int PACKS>
__global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS) few_rows(const Rows<T> given) {
    using Here = Layout<PACKS>;
    extern __shared__ __align__(16) uint8_t memory[];
    const uint32_t shared = address(memory), rank = cluster_rank();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x / PARTS * TILE, first = rank * Here::COLUMNS;
    const int columns = max(0, min(given.k - first, Here::COLUMNS));  // that exist

    await_previous();
    let_next_begin();
    const auto fetch_tile = [&](int to, const T* from, int64_t stride, int top, int rows) {
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            const int pack = thread + i * THREADS, row = pack / (PACKS * 4), column = pack % (PACKS * 4) * 8;
            const bool there = top + row < rows && column < columns;
            const T* at = there ? from + (top + row) * stride + first + column : from;
            copy_async(shared + to + row * Here::ROW + column * 2, at, there);
        }
    };
    fetch_tile(Here::X, given.x, given.x_stride, first_row, given.m);
    if (const int beta = thread / (THREADS / 2), column = thread % (THREADS / 2) * 8; column < Here::COLUMNS) {
        const T* from = beta ? given.beta : given.gamma;
        const uint32_t to = (beta ? Here::BETA : Here::GAMMA) + column * 2, usual = beta ? 0 : packed<T>(1.0f, 1.0f);
        if (from == nullptr) {
            *reinterpret_cast<uint4*>(memory + to) = {usual, usual, usual, usual};
        } else if (column < columns) {
            copy_async(shared + to, from + first + column, true);
        }
    }
    end_copies();
    fetch_tile(Here::W, given.w, given.w_stride, first_column, given.n);
    end_copies();

    // Four rows of y a warp in the end: 16 lanes have four columns each of one.
    const int slice_row = thread / 16, y_row = first_row + rank * SLICE + slice_row, y_column = first_column + thread % 16 * 4;
    float4 total = {};
    if (given.bias != nullptr && y_column < given.n) {
        const uint2 four = *reinterpret_cast<const uint2*>(given.bias + y_column);
        const float2 a = unpacked<T>(four.x), b = unpacked<T>(four.y);
        total = {a.x, a.y, b.x, b.y};
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");

    // Eight rows a warp, of which a thread has every fourth pack of one.
    const int row = warp * 8 + lane % 8, quarter = lane / 8;
    uint8_t* const packs = memory + Here::X + row * Here::ROW + quarter * 16;
    const float own_share = 1.0f / max(columns, 1);
    uint4 x[PACKS];
    await_copies<1>();
    __syncthreads();
    const auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            if ((i * 4 + quarter) * 8 >= columns) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) f(unpacked<T>((&x[i].x)[j]));
        }
    };
    const auto of_row = [](float value) {
        value += __shfl_xor_sync(0xffffffff, value, 8);
        return value + __shfl_xor_sync(0xffffffff, value, 16);
    };
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; i++) x[i] = *reinterpret_cast<const uint4*>(packs + i * 64);
    each([&](float2 v) { sum += v.x + v.y; });
    const float own_mean = of_row(sum) * own_share;
    each([&](float2 v) {
        squares = fmaf(v.x - own_mean, v.x - own_mean, fmaf(v.y - own_mean, v.y - own_mean, squares));
    });
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all blocks have begun
    tell(shared + Here::MOMENTS + (row * PARTS + rank) * 8, quarter, own_mean, of_row(squares));
    cluster_sync();

    // Mean and squares of all columns from those of the parts (Chan, Golub, LeVeque 1983).
    const auto* parts = reinterpret_cast<const float2*>(memory + Here::MOMENTS) + row * PARTS;
    float mean = 0.0f, all_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) mean += parts[i].x * max(0, min(given.k - i * Here::COLUMNS, Here::COLUMNS));
    mean *= given.share;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float apart = parts[i].x - mean;
        all_squares += parts[i].y + apart * apart * max(0, min(given.k - i * Here::COLUMNS, Here::COLUMNS));
    }
    const float scale = rsqrtf(all_squares * given.share + given.eps);
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int at = (i * 4 + quarter) * 16;
        const auto by = *reinterpret_cast<const uint4*>(memory + Here::GAMMA + at);
        const auto with = *reinterpret_cast<const uint4*>(memory + Here::BETA + at);
        if (at / 2 >= columns) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 v = unpacked<T>((&x[i].x)[j]), f = unpacked<T>((&by.x)[j]), o = unpacked<T>((&with.x)[j]);
            (&x[i].x)[j] = packed<T>(fmaf((v.x - mean) * scale, f.x, o.x), fmaf((v.y - mean) * scale, f.y, o.y));
        }
        *reinterpret_cast<uint4*>(packs + i * 64) = x[i];
    }
    await_copies<0>();
    __syncthreads();

    // 16×32 of the tile a warp.
    const int down = warp % PARTS, across = warp / PARTS * 32;
    const uint32_t x_at = shared + Here::X + (down * 16 + lane % 16) * Here::ROW + lane / 16 * 16;
    const uint32_t w_at = shared + Here::W + (across + lane / 16 * 8 + lane % 8) * Here::ROW + lane / 8 % 2 * 16;
    float z[16] = {};
#pragma unroll 8
    for (int step = 0; step < Here::COLUMNS / 16; step++) {
        uint32_t left[4], right[2][4];
        load_matrices(left, x_at + step * 32);
        load_matrices(right[0], w_at + step * 32);
        load_matrices(right[1], w_at + 16 * Here::ROW + step * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) multiply_few<T>(z + 4 * i, left, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
    }
    // Rows of the tile that a warp has are those that one block adds up.
    const uint32_t sums = shared + Here::SUMS + ((rank * SLICE + lane / 4) * PADDED + across + lane % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        tell(sums + i * 32, down, z[4 * i], z[4 * i + 1]);
        tell(sums + i * 32 + 8 * PADDED * 4, down, z[4 * i + 2], z[4 * i + 3]);
    }
    cluster_sync();

    const auto* from = reinterpret_cast<const float*>(memory + Here::SUMS) + slice_row * PADDED + thread % 16 * 4;
    float4 product = {};
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float4 part = *reinterpret_cast<const float4*>(from + i * SLICE * PADDED);
        product = {product.x + part.x, product.y + part.y, product.z + part.z, product.w + part.w};
    }
    if (y_row < given.m && y_column < given.n) {
        const uint2 result = {
            packed<T>(product.x + total.x, product.y + total.y), packed<T>(product.z + total.z, product.w + total.w)};
        *reinterpret_cast<uint2*>(given.y + int64_t(y_row) * given.n + y_column) = result;
    }
}

template <typename T, int PACKS>
int launch(const Rows<T>& given, cudaStream_t stream) {
    constexpr int BYTES = Layout<PACKS>::BYTES;
    cudaFuncSetAttribute(few_rows<T, PACKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    const dim3 blocks((given.n + TILE - 1) / TILE * PARTS, (given.m + TILE - 1) / TILE);
    return launch_early(few_rows<T, PACKS>, blocks, THREADS, BYTES, stream, given);
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

// Of up to 2048 columns, whose number divides by 8.
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* y, int64_t m, int64_t n,
    int64_t k, int64_t x_stride, int64_t w_stride, double eps, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) -> int {
        using T = decltype(zero);
        const Rows<T> given = {
            (const T*)x, (const T*)gamma, (const T*)beta, (const T*)w, (const T*)bias, (T*)y, x_stride, w_stride,
            int(m), int(n), int(k), 1.0f / k, float(eps)};
        if (k <= 512) return launch<T, 4>(given, stream);
        if (k <= 768) return launch<T, 6>(given, stream);
        if (k <= 1024) return launch<T, 8>(given, stream);
        if (k <= 1536) return launch<T, 12>(given, stream);
        return k <= 2048 ? launch<T, 16>(given, stream) : int(cudaErrorInvalidValue);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

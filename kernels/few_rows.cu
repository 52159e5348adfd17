// LayerNorm of a few rows and the product after it in one launch: blocks normalise what they multiply.
//
// Blocks of a cluster make a tile of y together. Each has its part of the columns of the tile's rows of x and w, all of which
// are on their way at once; they tell each other mean and squares of their parts, multiply theirs, and then each adds up
// some of the tile's rows. What they tell is counted by a barrier of who is told: a barrier of the cluster that orders
// stores would cost a fence over the whole GPU, each time. On an H100 fewer than 32 clusters of four run at once, and 66 of
// two.
#include "hopper.cuh"

namespace optexp::hopper {

constexpr int DOWN = 32;  // rows of a tile

template <typename T>
struct Operands {
    const T *gamma, *beta, *bias;
    T* y;
    int m, n, k;
    float share, eps;  // 1/k
};

// Tiles of so many parts, and what a block keeps in shared memory, of so many times 64 columns.
template <int PARTS, int BOXES>
struct Layout {
    static constexpr int ACROSS = PARTS * 32, SLICE = DOWN / PARTS, COLUMNS = BOXES * 64;
    static constexpr int PADDED = ACROSS + 8;  // floats of a row of sums: a warp's eight rows are in different banks
    static constexpr int X_BOX = DOWN * 128, W_BOX = ACROSS * 128;
    static constexpr int X = 0, W = X + BOXES * X_BOX, GAMMA = W + BOXES * W_BOX, BETA = GAMMA + COLUMNS * 4;
    static constexpr int SUMS = BETA + COLUMNS * 4, MOMENTS = SUMS + DOWN * PADDED * 4;
    static constexpr int HAVE_X = MOMENTS + DOWN * PARTS * 8, HAVE_W = HAVE_X + 8, HAVE_MOMENTS = HAVE_W + 8;
    static constexpr int HAVE_SUMS = HAVE_MOMENTS + 8, BYTES = HAVE_SUMS + 8;
};

// Two floats, where `at` and the barrier that counts them lie in a block of the cluster.
__device__ inline void tell(uint32_t at, uint32_t barrier, uint32_t rank, float a, float b) {
    asm volatile(
        "{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter];\n}" ::"r"(at),
        "r"(barrier), "r"(rank), "f"(a), "f"(b)
        : "memory");
}

template <typename T, int PARTS, int BOXES>
__global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1)
    few_rows(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Operands<T> given) {
    using Here = Layout<PARTS, BOXES>;
    constexpr int ACROSS = Here::ACROSS, X_BOX = Here::X_BOX, W_BOX = Here::W_BOX, SLICE = Here::SLICE, PADDED = Here::PADDED;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = address(memory), rank = cluster_rank();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int first_row = blockIdx.y * DOWN, first_column = blockIdx.x / PARTS * ACROSS, first = rank * Here::COLUMNS;
    const auto columns_of = [&](int part) { return max(0, min(given.k - part * Here::COLUMNS, Here::COLUMNS)); };
    const int columns = columns_of(rank);  // that exist; in the others' place are zeros

    if (thread == 0) {
        prefetch(x_map);
        prefetch(w_map);
        for (int barrier = Here::HAVE_X; barrier <= Here::HAVE_SUMS; barrier += 8) make_barrier(shared + barrier, 1);
        publish_barriers();
        expect(shared + Here::HAVE_X, BOXES * X_BOX);
        expect(shared + Here::HAVE_W, BOXES * W_BOX);
        expect(shared + Here::HAVE_MOMENTS, DOWN * PARTS * 8);
        expect(shared + Here::HAVE_SUMS, DOWN * ACROSS * 4);
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    await_previous();
    let_next_begin();
    if (thread == 0) {
        for (int box = 0; box < BOXES; box++) {
            fetch(shared + Here::X + box * X_BOX, x_map, first + box * 64, first_row, shared + Here::HAVE_X);
        }
        for (int box = 0; box < BOXES; box++) {
            fetch(shared + Here::W + box * W_BOX, w_map, first + box * 64, first_column, shared + Here::HAVE_W);
        }
    }
    auto* const gamma = reinterpret_cast<float*>(memory + Here::GAMMA);
    auto* const beta = reinterpret_cast<float*>(memory + Here::BETA);
#pragma unroll 1
    for (int column = thread; column < Here::COLUMNS; column += THREADS) {
        const bool there = column < columns;
        gamma[column] = there && given.gamma != nullptr ? float(given.gamma[first + column]) : 1.0f;
        beta[column] = there && given.beta != nullptr ? float(given.beta[first + column]) : 0.0f;
    }
    // What a thread adds up in the end: four columns of a row of the block's slice.
    const int slice_row = thread / (ACROSS / 4), slice_column = thread % (ACROSS / 4) * 4;
    const int y_row = first_row + rank * SLICE + slice_row, y_column = first_column + slice_column;
    float4 total = {};
    if (given.bias != nullptr && y_column < given.n) {
        const uint2 four = *reinterpret_cast<const uint2*>(given.bias + y_column);
        const float2 a = unpacked<T>(four.x), b = unpacked<T>(four.y);
        total = {a.x, a.y, b.x, b.y};
    }
    __syncthreads();

    // Four rows a warp, of which a thread has every eighth pack of 8 columns of one.
    const int row = warp * 4 + lane % 4, eighth = lane / 4;
    auto* const packs = reinterpret_cast<uint4*>(memory + Here::X + row * 128 + (eighth ^ row % 8) * 16);
    const auto of_row = [](float value) {
        for (int step = 4; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffff, value, step);
        return value;
    };
    float2 x[BOXES][4];
    float sum = 0.0f, squares = 0.0f;
    wait(shared + Here::HAVE_X, 0);
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        const uint4 pack = packs[i * X_BOX / 16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[i][j] = unpacked<T>((&pack.x)[j]);
            sum += x[i][j].x + x[i][j].y;
        }
    }
    const float own_mean = of_row(sum) / max(columns, 1);  // of a constant row exactly that, as is `mean`
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        if ((i * 8 + eighth) * 8 >= columns) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[i][j] = {x[i][j].x - own_mean, x[i][j].y - own_mean};
            squares = fmaf(x[i][j].x, x[i][j].x, fmaf(x[i][j].y, x[i][j].y, squares));
        }
    }
    squares = of_row(squares);
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all blocks have their barriers
    if (eighth < PARTS) {
        tell(shared + Here::MOMENTS + (row * PARTS + rank) * 8, shared + Here::HAVE_MOMENTS, eighth, own_mean, squares);
    }
    wait(shared + Here::HAVE_MOMENTS, 0);

    // Mean and squares of all columns from those of the parts (Chan, Golub, LeVeque 1983).
    const auto* parts = reinterpret_cast<const float2*>(memory + Here::MOMENTS) + row * PARTS;
    float mean = 0.0f, all_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) mean += parts[i].x * columns_of(i);
    mean /= given.k;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float apart = parts[i].x - mean;
        all_squares += parts[i].y + apart * apart * columns_of(i);
    }
    const float scale = rsqrtf(all_squares * given.share + given.eps);
    const float shift = columns > 0 ? (own_mean - mean) * scale : 0.0f;  // without columns it could be any size, even in half
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        const int column = (i * 8 + eighth) * 8;
        uint4 pack;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const auto f = reinterpret_cast<const float2*>(gamma + column)[j];
            const auto o = reinterpret_cast<const float2*>(beta + column)[j];
            const float2 v = {fmaf(x[i][j].x, scale, shift), fmaf(x[i][j].y, scale, shift)};
            (&pack.x)[j] = packed<T>(fmaf(v.x, f.x, o.x), fmaf(v.y, f.y, o.y));
        }
        packs[i * X_BOX / 16] = pack;
    }
    wait(shared + Here::HAVE_W, 0);
    __syncthreads();

    // 16 rows and a quarter of the columns of the tile a warp.
    const int down = warp % 2, across = warp / 2 * (ACROSS / 4);
    const uint32_t x_at = shared + Here::X + (down * 16 + lane % 16) * 128;
    const uint32_t w_at = shared + Here::W + (across + lane / 16 * 8 + lane % 8) * 128;
    float z[PARTS * 4] = {};
#pragma unroll
    for (int step = 0; step < Here::COLUMNS / 16; step++) {
        const int box = step / 4, pack = step % 4 * 2;
        const uint32_t w_pack = box * W_BOX + ((pack + lane / 8 % 2) ^ lane % 8) * 16;
        uint32_t left[4], right[PARTS / 2][4];
        load_matrices(left, x_at + box * X_BOX + ((pack + lane / 16) ^ lane % 8) * 16);
#pragma unroll
        for (int i = 0; i < PARTS / 2; i++) load_matrices(right[i], w_at + i * 16 * 128 + w_pack);
#pragma unroll
        for (int i = 0; i < PARTS; i++) multiply_few<T>(z + 4 * i, left, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
    }
    const uint32_t sums = shared + Here::SUMS + ((rank * SLICE + lane / 4) * PADDED + across + lane % 4 * 2) * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row_of_eight = down * 16 + half * 8, to = row_of_eight / SLICE;
        const uint32_t there = sums + row_of_eight % SLICE * PADDED * 4;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            tell(there + i * 32, shared + Here::HAVE_SUMS, to, z[4 * i + 2 * half], z[4 * i + 2 * half + 1]);
        }
    }
    wait(shared + Here::HAVE_SUMS, 0);
    const auto* from = reinterpret_cast<const float*>(memory + Here::SUMS) + slice_row * PADDED + slice_column;
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

template <typename T, int PARTS, int BOXES>
int launch(const CUtensorMap& x, const CUtensorMap& w, const Operands<T>& given, cudaStream_t stream) {
    using Here = Layout<PARTS, BOXES>;
    cudaFuncSetAttribute(few_rows<T, PARTS, BOXES>, cudaFuncAttributeMaxDynamicSharedMemorySize, Here::BYTES);
    const dim3 blocks((given.n + Here::ACROSS - 1) / Here::ACROSS * PARTS, (given.m + DOWN - 1) / DOWN);
    return launch_early(few_rows<T, PARTS, BOXES>, blocks, THREADS, Here::BYTES, stream, x, w, given);
}

template <typename T, int PARTS>
int launch(const void* x, const void* w, int64_t x_stride, int64_t w_stride, const Operands<T>& given, cudaStream_t stream) {
    constexpr bool HALF = std::is_same_v<T, __half>;
    CUtensorMap x_map, w_map;
    if (int status = describe(x_map, HALF, x, given.m, given.k, x_stride, DOWN)) return status;
    if (int status = describe(w_map, HALF, w, given.n, given.k, w_stride, PARTS * 32)) return status;
    if (given.k <= 512) return launch<T, PARTS, 8 / PARTS>(x_map, w_map, given, stream);
    if (given.k <= 768) return launch<T, PARTS, 12 / PARTS>(x_map, w_map, given, stream);
    if (given.k <= 1024) return launch<T, PARTS, 16 / PARTS>(x_map, w_map, given, stream);
    if (given.k <= 1536) return launch<T, PARTS, 24 / PARTS>(x_map, w_map, given, stream);
    return given.k <= 2048 ? launch<T, PARTS, 32 / PARTS>(x_map, w_map, given, stream) : int(cudaErrorInvalidValue);
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

// Of up to 2048 columns, whose number divides by 8. `parts`: blocks of a cluster, 2 or 4.
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* y, int64_t m, int64_t n,
    int64_t k, int64_t x_stride, int64_t w_stride, double eps, int64_t parts, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)gamma, (const T*)beta, (const T*)bias, (T*)y, int(m), int(n), int(k), 1.0f / k, float(eps)};
        return parts == 2 ? launch<T, 2>(x, w, x_stride, w_stride, given, stream)
                          : launch<T, 4>(x, w, x_stride, w_stride, given, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

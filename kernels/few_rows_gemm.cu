// LayerNorm of a few rows and the GEMM after it in one launch: blocks normalise what they multiply.
//
// Two blocks of a cluster make a tile of y together. Each has half of the columns of the tile's rows of x and w, all of
// which are on their way at once. It takes its half's own mean from x, multiplies, and tells the other the sums of half of
// the rows, which that corrects by what both halves' means and squares make of the row's: so blocks wait for each other
// once. With m the mean of a half, μ and r mean and 1/deviation of the row:
//
//     y = r·Σ over halves of (Σ(x − m)·γ·w + (m − μ)·Σγ·w) + Σβ·w + bias
//
// where γ and β are two more rows of the GEMM. Where a weight, or one of these, is infinite, so are their sums, and
// infinities would cancel: such columns are made again, slowly, as the norm and the GEMM one after the other make them.
//
// What blocks tell is counted by a barrier of who is told: a barrier of the cluster that orders stores would cost a fence
// over the whole GPU. Each thread's store is a message of its own, so there are few, of 16 bytes.
#include "hopper.cuh"

namespace optexp::hopper {

constexpr int DOWN = 32, ACROSS = 64, SLICE = DOWN / 2;  // rows and columns of a tile, and rows of it that a block finishes
constexpr int ALL = DOWN + 8;                            // rows of the GEMM: γ and β, too, and six of no use
constexpr int THREADS = 256;

template <typename T>
struct Operands {
    const T *x, *gamma, *beta, *w, *bias;
    T* y;
    int m, n, k;
    int64_t x_stride, w_stride;
    float share, eps;  // 1/k
};

// What a block keeps in shared memory, of so many times 64 columns.
template <int BOXES>
struct Layout {
    static constexpr int COLUMNS = BOXES * 64, X_BOX = ALL * 128, W_BOX = ACROSS * 128;
    static constexpr int X = 0, W = X + BOXES * X_BOX, SUMS = W + BOXES * W_BOX, CONSTANTS = SUMS + SLICE * ACROSS * 4;
    static constexpr int MOMENTS = CONSTANTS + ACROSS * 8, HAVE_W = MOMENTS + 2 * SLICE * 8;
    static constexpr int HAVE_MOMENTS = HAVE_W + BOXES * 8, HAVE_SUMS = HAVE_MOMENTS + 8, BYTES = HAVE_SUMS + 8;
};

// Floats for the other or this block of the cluster: where they go to, and the barrier there that counts them.
__device__ inline void tell(uint32_t at, uint32_t barrier, uint32_t rank, float a, float b) {
    asm volatile(
        "{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter];\n}" ::"r"(at),
        "r"(barrier), "r"(rank), "f"(a), "f"(b)
        : "memory");
}

__device__ inline void tell(uint32_t at, uint32_t barrier, uint32_t rank, float a, float b, float c, float d) {
    asm volatile(
        "{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}" ::"r"(at),
        "r"(barrier), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}

// As exact as a quotient, but for the last bit, without its branches.
__device__ inline float divided(float sum, float by, float inverse) {
    const float about = sum * inverse;
    return fmaf(fmaf(-about, by, sum), inverse, about);
}

// float16 holds neither all differences nor small ones well: of that, halves are divided by their deviation.
__device__ inline float deviation(float squares, float inverse) {
    const float variance = squares * inverse;
    return variance > 0.0f ? sqrtf(variance) : 1.0f;
}

// By a warp: one row of y by the norm and the GEMM after it, in columns first + i whose bit 4i is set in `which`.
template <typename T>
__device__ void make_again(const Operands<T>& given, int row, int first, uint32_t which) {
    const int lane = threadIdx.x % 32;
    const T* const x = given.x + row * given.x_stride;
    const auto sum_of = [&](auto term) {
        float sum = 0.0f;
        for (int i = lane; i < given.k; i += 32) sum += term(i);
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        return sum;
    };
    const float mean = divided(sum_of([&](int i) { return float(x[i]); }), given.k, given.share);
    const auto centred = [&](int i) { return float(x[i]) - mean; };
    const float r = rsqrtf(sum_of([&](int i) { return centred(i) * centred(i); }) * given.share + given.eps);
    for (; which != 0; which &= which - 1) {
        const int column = first + (__ffs(which) - 1) / 4;
        const T* const w = given.w + column * given.w_stride;
        const float y = sum_of([&](int i) { return normalised(x, given.gamma, given.beta, i, mean, r) * float(w[i]); });
        const float bias = given.bias == nullptr ? 0.0f : float(given.bias[column]);
        if (lane == 0) given.y[int64_t(row) * given.n + column] = T(y + bias);
    }
}

template <typename T, int BOXES>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    few_rows(const __grid_constant__ CUtensorMap w_map, const Operands<T> given) {
    using Here = Layout<BOXES>;
    constexpr bool DIVIDED = std::is_same_v<T, __half>;
    constexpr int X_BOX = Here::X_BOX, W_BOX = Here::W_BOX;
    constexpr int AT_ONCE = BOXES / 2;  // are normalised before they are multiplied, while the others are normalised
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = address(memory), rank = cluster_rank();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, eighth = lane % 8;
    const int first_row = blockIdx.y * DOWN, first_column = blockIdx.x / 2 * ACROSS, first = rank * Here::COLUMNS;
    const auto columns_of = [&](int part) { return max(0, min(given.k - part * Here::COLUMNS, Here::COLUMNS)); };
    const int columns = columns_of(rank);  // that exist; in the others' place are zeros

    if (thread == 0) {
        prefetch(w_map);
        for (int barrier = Here::HAVE_W; barrier <= Here::HAVE_SUMS; barrier += 8) make_barrier(shared + barrier, 1);
        publish_barriers();
        for (int box = 0; box < BOXES; box++) expect(shared + Here::HAVE_W + box * 8, W_BOX);
        expect(shared + Here::HAVE_MOMENTS, 2 * SLICE * 8);
        expect(shared + Here::HAVE_SUMS, SLICE * ACROSS * 4 + ACROSS * 8);
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    await_previous();

    // Four rows a warp, of which a thread has every eighth pack of 8 columns of one.
    const int row = warp * 4 + lane / 8;
    const bool exists = first_row + row < given.m;
    uint4 x[BOXES], gamma[BOXES];
    const auto exist = [&](int box) { return (box * 8 + eighth) * 8 < columns; };
    const auto part_of = [&](const T* row) { return reinterpret_cast<const uint4*>(row + first) + eighth; };
    const uint4* const packs = part_of(given.x + (first_row + row) * given.x_stride);
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        x[i] = {};
        if (exists && exist(i)) x[i] = packs[i * 8];
    }
    if (thread == 0) {
        for (int box = 0; box < BOXES; box++) {
            fetch(shared + Here::W + box * W_BOX, w_map, first + box * 64, first_column, shared + Here::HAVE_W + box * 8);
        }
    }
    const uint32_t one = packed<T>(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        gamma[i] = {};
        if (exist(i) && given.gamma != nullptr) gamma[i] = part_of(given.gamma)[i * 8];
        if (exist(i) && given.gamma == nullptr) gamma[i] = {one, one, one, one};
    }
    const auto place = [&](int row, int box) {
        return reinterpret_cast<uint4*>(memory + Here::X + box * X_BOX + row * 128 + (eighth ^ row % 8) * 16);
    };
    if (warp == 7 && lane < 8) {
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            *place(DOWN + 1, i) = exist(i) && given.beta != nullptr ? part_of(given.beta)[i * 8] : uint4{};
        }
    }
    // Columns of y that a thread of the first four warps finishes, eight apart.
    const int y_column = first_column + warp * 16 + lane / 4;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = y_column + half * 8;
        if (warp < 4 && given.bias != nullptr && column < given.n) bias[half] = float(given.bias[column]);
    }

    // Tensor cores add up what four threads have of two boxes, exactly: eight columns of ones.
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < BOXES; i += 2) {
        const uint32_t a[4] = {x[i].x, x[i + 1].x, x[i].y, x[i + 1].y}, b[4] = {x[i].z, x[i + 1].z, x[i].w, x[i + 1].w};
        multiply_few<T>(sums[0], a, one, one);
        multiply_few<T>(sums[1], b, one, one);
    }
    const float count = max(columns, 1), inverse = __fdividef(1.0f, count);
    float sum = sums[0][0] + sums[0][2] + (sums[1][0] + sums[1][2]);
    sum += __shfl_xor_sync(0xffffffff, sum, 4);
    const float mean = divided(sum, count, inverse);  // of a constant row exactly that
    const auto centred = [&](uint32_t both) {
        const float2 v = unpacked<T>(both);
        return float2{v.x - mean, v.y - mean};
    };
    float squares[2] = {}, scale = 1.0f;
    const auto square = [&](int box) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 v = centred((&x[box].x)[j]);
            squares[0] = fmaf(v.x, v.x, squares[0]);
            squares[1] = fmaf(v.y, v.y, squares[1]);
        }
    };
    const auto all_squares = [&] {
        float all = squares[0] + squares[1];
        for (int step = 1; step < 8; step *= 2) all += __shfl_xor_sync(0xffffffff, all, step);
        return all;
    };
    if constexpr (DIVIDED) {
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            if (exist(i)) square(i);
        }
        scale = __fdividef(1.0f, deviation(all_squares(), inverse));
    }

    // 64 columns of the tile by the first four warps, whose rows are columns of z: the tile turned.
    float z[ALL / 2] = {};
#pragma unroll
    for (int box = 0; box < BOXES; box += AT_ONCE) {
#pragma unroll
        for (int i = box; i < box + AT_ONCE; i++) {
            uint4 pack = {};
            if (exist(i)) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 v = centred((&x[i].x)[j]), f = unpacked<T>((&gamma[i].x)[j]);
                    (&pack.x)[j] = DIVIDED ? packed<T>(v.x * scale * f.x, v.y * scale * f.y) : packed<T>(v.x * f.x, v.y * f.y);
                }
                if constexpr (!DIVIDED) square(i);
            }
            *place(row, i) = pack;
            if (thread < 8) *place(DOWN, i) = gamma[i];
        }
        publish_writes();
        __syncthreads();
        if (warp >= 4) continue;
#pragma unroll
        for (int i = box; i < box + AT_ONCE; i++) {
            wait(shared + Here::HAVE_W + i * 8, 0);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) {
                multiply<T>(z, matrix(shared + Here::W + i * W_BOX) + step * 2, matrix(shared + Here::X + i * X_BOX) + step * 2);
            }
            wgmma_commit();
        }
    }
    const float here = all_squares();
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // both blocks have their barriers
    if (eighth == 0) {
        tell(shared + Here::MOMENTS + (row % SLICE * 2 + rank) * 8, shared + Here::HAVE_MOMENTS, row / SLICE, mean, here);
    }
    if (warp >= 4) return;
    wgmma_wait<0>();
    refresh(z);

    // Sums of 16 rows for the other block's thread of the same place, which has the same sums of its half.
    float own[8], theirs[8], constants[4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        own[i] = rank == 0 ? z[i] : z[i + 8];
        theirs[i] = rank == 0 ? z[i + 8] : z[i];
    }
    const uint32_t to = shared + Here::SUMS + thread * 16;
    tell(to, shared + Here::HAVE_SUMS, rank ^ 1, theirs[0], theirs[1], theirs[2], theirs[3]);
    tell(to + SLICE * ACROSS * 2, shared + Here::HAVE_SUMS, rank ^ 1, theirs[4], theirs[5], theirs[6], theirs[7]);
    if (lane % 4 == 0) {  // has those of γ and β
        tell(shared + Here::CONSTANTS + thread / 4 * 16, shared + Here::HAVE_SUMS, rank ^ 1, z[16], z[17], z[18], z[19]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) constants[i] = __shfl_sync(0xffffffff, z[16 + i], lane / 4 * 4);

    // Mean and squares of all columns from those of the halves (Chan, Golub, LeVeque 1983).
    const float share = columns_of(rank ^ 1) * given.share, own_share = columns * given.share;
    const float other_inverse = __fdividef(1.0f, max(columns_of(rank ^ 1), 1));
    float factors[4], other_factors[4], shifts[4], other_shifts[4];
    wait(shared + Here::HAVE_MOMENTS, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const auto* both = reinterpret_cast<const float2*>(memory + Here::MOMENTS) + (i / 2 * 8 + lane % 4 * 2 + i % 2) * 2;
        const float2 a = both[rank], b = both[rank ^ 1];
        const float apart = columns > 0 && share > 0.0f ? b.x - a.x : 0.0f;  // without columns it could be any size
        const float variance = (a.y + b.y) * given.share + apart * apart * own_share * share;
        const float r = rsqrtf(variance + given.eps);
        factors[i] = DIVIDED && r > 0.0f ? r * deviation(a.y, inverse) : r;
        other_factors[i] = DIVIDED && r > 0.0f ? r * deviation(b.y, other_inverse) : r;
        shifts[i] = -apart * share * r;
        other_shifts[i] = apart * own_share * r;
    }
    let_next_begin();  // earlier, its blocks would be in the way of these
    wait(shared + Here::HAVE_SUMS, 0);
    const auto* arrived = reinterpret_cast<const float4*>(memory + Here::SUMS) + thread;
    const float4 first_four = arrived[0], last_four = arrived[SLICE * ACROSS / 8];
    const float other[8] = {first_four.x, first_four.y, first_four.z, first_four.w,
                            last_four.x,  last_four.y,  last_four.z,  last_four.w};
    const float4 told = reinterpret_cast<const float4*>(memory + Here::CONSTANTS)[thread / 4];
    const float other_constants[4] = {told.x, told.y, told.z, told.w};
    bool finite[2];  // are the sums of its columns
#pragma unroll
    for (int i = 0; i < 2; i++) {
        finite[i] = isfinite(constants[i * 2] + other_constants[i * 2] + constants[i * 2 + 1] + other_constants[i * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {  // of eight rows two columns, and of each two rows
        const int which = i / 4 * 2 + i % 2, half = i / 2 % 2;
        const int y_row = first_row + rank * SLICE + i / 4 * 8 + lane % 4 * 2 + i % 2, column = y_column + half * 8;
        float y = fmaf(factors[which], own[i], other_factors[which] * other[i]);
        y = fmaf(shifts[which], constants[half * 2], fmaf(other_shifts[which], other_constants[half * 2], y));
        y += constants[half * 2 + 1] + other_constants[half * 2 + 1] + bias[half];
        if (finite[half] && y_row < given.m && column < given.n) given.y[int64_t(y_row) * given.n + column] = T(y);
    }
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const bool again = lane % 4 == 0 && !(half == 0 ? finite[0] : finite[1]) && y_column + half * 8 < given.n;
        const uint32_t which = __ballot_sync(0xffffffff, again);
        const int begin = first_row + rank * SLICE, end = which == 0 ? begin : min(begin + SLICE, given.m);
        for (int y_row = begin; y_row < end; y_row++) make_again(given, y_row, first_column + warp * 16 + half * 8, which);
    }
}

template <typename T, int BOXES>
int launch(const CUtensorMap& w, const Operands<T>& given, cudaStream_t stream) {
    constexpr int BYTES = Layout<BOXES>::BYTES;
    cudaFuncSetAttribute(few_rows<T, BOXES>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    const dim3 blocks((given.n + ACROSS - 1) / ACROSS * 2, (given.m + DOWN - 1) / DOWN);
    return launch_with_pdl(few_rows<T, BOXES>, blocks, THREADS, BYTES, stream, w, given);
}

template <typename T>
int launch(const void* w, int64_t w_stride, const Operands<T>& given, cudaStream_t stream) {
    CUtensorMap w_map;
    if (int status = describe(w_map, std::is_same_v<T, __half>, w, given.n, given.k, w_stride, ACROSS)) return status;
    if (given.k <= 512) return launch<T, 4>(w_map, given, stream);
    if (given.k <= 768) return launch<T, 6>(w_map, given, stream);
    if (given.k <= 1024) return launch<T, 8>(w_map, given, stream);
    if (given.k <= 1536) return launch<T, 12>(w_map, given, stream);
    return given.k <= 2048 ? launch<T, 16>(w_map, given, stream) : int(cudaErrorInvalidValue);
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

// Of up to 2048 columns, whose number divides by 8.
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* y, int64_t m, int64_t n,
    int64_t k, int64_t x_stride, int64_t w_stride, double eps, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)x, (const T*)gamma, (const T*)beta, (const T*)w, (const T*)bias, (T*)y, int(m), int(n), int(k), x_stride,
            w_stride, 1.0f / k, float(eps)};
        return launch<T>(w, w_stride, given, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

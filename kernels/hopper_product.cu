// x·wᵀ on Hopper with the norm of x's rows before it, or GELU after it, at the rate of the product alone.
//
// A block is one to a multiprocessor and goes from tile to tile. One of its warps has the copy engine fetch steps of x
// and w into a ring of stages; two warpgroups multiply them, half of the tile's rows each, the second some steps behind
// the first, so that each finishes its half while the other multiplies. Two blocks, one above the other, share what is
// fetched of w.
//
// For a norm they take x into registers first, from where tensor cores read as well, and sum its rows there. Shared
// memory, which fetching and multiplying keep busy all the time, is read no more for it.
#include <algorithm>

#include "hopper.cuh"

namespace optexp::hopper {

enum Form { NORM, TANH, ERF };

constexpr int M = 128, N = 256, K = 64;  // of a tile and a step: 128 bytes of a row, as wide as a swizzle
constexpr int STAGES = 4, BEHIND = 2;    // steps in shared memory, and between the two warpgroups
constexpr int CLUSTER = 2, GROUP = 8;    // blocks that share w, and clusters one above the other that share L2
constexpr int BLOCK = 384, GROUP_SIZE = 128;
constexpr int MULTIPLIERS = 8;  // warps
constexpr int CHUNK = 64;       // columns that are written at once

constexpr int X_BYTES = M * K * 2, W_BYTES = N * K * 2, STAGE = X_BYTES + W_BYTES;
constexpr int OUT = STAGES * STAGE, OUT_BYTES = 16 * CHUNK * 2;  // two for each warp
constexpr int FULL = OUT + 2 * MULTIPLIERS * OUT_BYTES, EMPTY = FULL + STAGES * 8;
constexpr int SHARED = EMPTY + STAGES * 8 + 1024;  // it begins at a multiple of 1024

constexpr float LARGE_MEAN = 16.0f;  // deviations; as in layernorm_linear.py

// --- which tile, and which stage -----------------------------------------------------------------------------------

struct Grid {
    int down, across, steps;  // clusters one above the other, and side by side
};

template <typename T>
struct Operands {
    const T *x, *w, *bias;        // no bias: null
    const float *total, *offset;  // of the rows of w: their sums, and what is added to their columns of y
    int64_t x_stride;
    int m, n, k;
    float share, eps;  // 1/k
    Grid grid;
};

// The tiles of a block, of which those of a cluster are one above the other.
struct Tiles {
    const Grid& grid;
    int cluster = blockIdx.x / CLUSTER;

    __device__ explicit Tiles(const Grid& grid) : grid(grid) {}
    __device__ bool left() const { return cluster < grid.down * grid.across; }
    __device__ void next() { cluster += gridDim.x / CLUSTER; }
    __device__ int first() const { return cluster / (GROUP * grid.across) * GROUP; }
    __device__ int height() const { return min(grid.down - first(), GROUP); }
    __device__ int row() const {
        return ((first() + cluster % (GROUP * grid.across) % height()) * CLUSTER + int(cluster_rank())) * M;
    }
    __device__ int column() const { return cluster % (GROUP * grid.across) / height() * N; }
};

struct Ring {
    uint32_t base;
    int stage = 0;
    uint32_t parity = 0;

    __device__ explicit Ring(uint32_t base) : base(base) {}
    __device__ uint32_t x() const { return base + stage * STAGE; }
    __device__ uint32_t w() const { return x() + X_BYTES; }
    __device__ uint32_t full() const { return base + FULL + stage * 8; }
    __device__ uint32_t empty() const { return base + EMPTY + stage * 8; }
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// --- fetching ------------------------------------------------------------------------------------------------------

// Of w, half for both blocks of the cluster: the other block fetches the other half.
__device__ void fetch_all(uint32_t base, const Grid& grid, const CUtensorMap& x, const CUtensorMap& w) {
    constexpr int SHARE = N / CLUSTER;
    const int share = cluster_rank() * SHARE;
    Ring ring(base);
    for (Tiles tile(grid); tile.left(); tile.next()) {
        const int row = tile.row(), column = tile.column() + share;
        for (int step = 0; step < grid.steps; step++, ring.next()) {
            wait(ring.empty(), ring.parity ^ 1);
            expect(ring.full(), STAGE);
            fetch(ring.x(), x, step * K, row, ring.full());
            fetch_for((1 << CLUSTER) - 1, ring.w() + share * K * 2, w, step * K, column, ring.full());
        }
    }
}

// --- mean and deviation --------------------------------------------------------------------------------------------

// Of the two rows of which a lane has elements; after `finish`, of whole rows.
struct Sums {
    float sum[2] = {}, square[2] = {};

    __device__ __forceinline__ void add(const uint32_t (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = __uint_as_float(x[i] << 16), high = __uint_as_float(x[i] & 0xffff0000);
            sum[i % 2] += low;
            square[i % 2] = fmaf(low, low, square[i % 2]);
            sum[i % 2] += high;
            square[i % 2] = fmaf(high, high, square[i % 2]);
        }
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; half++) sum[half] = over_row(sum[half]), square[half] = over_row(square[half]);
    }

    // Over the four lanes that have a row between them.
    static __device__ float over_row(float value) {
        value += __shfl_xor_sync(0xffffffff, value, 1);
        return value + __shfl_xor_sync(0xffffffff, value, 2);
    }
};

// A warp's 16 rows once more, from memory and centred: their own large mean left too few bits of z. Of 32 columns a
// lane takes eight in a row, of both operands: in which order they are multiplied does not matter. What is left of the
// mean is taken out as before: a small one can be rounded away again, as if nothing had been subtracted.
template <typename T>
__device__ __forceinline__ void redo_centred(
    float (&z)[128], const Operands<T>& given, int row, int column, float2 (&of)[2]) {
    const int lane = threadIdx.x % 32;
    float square[2] = {}, left[2] = {};
#pragma unroll
    for (int i = 0; i < 128; i++) z[i] = 0.0f;
    const T* x_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) x_row[half] = given.x + min(row + half * 8, given.m - 1) * given.x_stride;
    const T* w_first = given.w + int64_t(column + lane / 4) * given.k;
#pragma unroll 1  // else there are not enough registers
    for (int inner = lane % 4 * 8; inner < (given.k + 31) / 32 * 32; inner += 32) {
        uint32_t x[2][4] = {};
        if (inner < given.k) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto pack = load<8>(x_row[half] + inner, 0);
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    const float one = float(pack.values[i]) - of[half].x, two = float(pack.values[i + 1]) - of[half].x;
                    square[half] = fmaf(one, one, fmaf(two, two, square[half]));
                    const __nv_bfloat162 both = __floats2bfloat162_rn(one, two);
                    left[half] += __low2float(both) + __high2float(both);
                    x[half][i / 2] = reinterpret_cast<const uint32_t&>(both);
                }
            }
        }
        const T* w_row = w_first + min(inner, given.k - 8);  // beyond, x is zero
#pragma unroll
        for (int j = 0; j < N / 8; j++, w_row += 8 * given.k) {
            asm volatile("" : "+l"(w_row));  // else 32 of them are kept in registers
            const uint4 w = *reinterpret_cast<const uint4*>(w_row);
            multiply_few(z + 4 * j, x[0][0], x[1][0], x[0][1], x[1][1], w.x, w.y);
            multiply_few(z + 4 * j, x[0][2], x[1][2], x[0][3], x[1][3], w.z, w.w);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float variance = Sums::over_row(square[half]) * given.share;
        of[half] = {Sums::over_row(left[half]) * given.share, rsqrtf(variance + given.eps)};
    }
}

// --- from accumulators to y ----------------------------------------------------------------------------------------

// Where x·Φ(x) has Φ = 1/(1 + e^(-2u)) = (1 + tanh u)/2, u: for erf by a polynomial, off by 2^-13 at most, or 2^-10.
// (Twice that is how far Φ is off, relatively.)
template <typename T, Form FORM>
__device__ float exponent(float z) {
    const float square = z * z;
    if constexpr (FORM == TANH) return z * fmaf(0.035677408136300125f, square, 0.7978845608028654f);
    if constexpr (std::is_same_v<T, __half>) {
        float p = 6.38709474e-10f;
        for (float term : {-6.08477251e-8f, 2.25798158e-6f, -3.60947306e-5f, -1.36443821e-4f, 0.0365718417f}) {
            p = fmaf(p, square, term);
        }
        return z * fmaf(p, square, 0.797728717f);
    } else {
        const float p = fmaf(fmaf(4.51604456e-6f, square, -4.93357365e-4f), square, 0.0379140005f);
        return z * fmaf(p, square, 0.79630363f);
    }
}

// tanh by the instruction is good for bfloat16: it is off by 2^-11.
template <typename T, Form FORM>
__device__ float gelu(float z) {
    const float u = exponent<T, FORM>(z);
    if constexpr (std::is_same_v<T, __half>) return z * __fdividef(1.0f, 1.0f + __expf(-2.0f * u));
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(u));
    return fmaf(0.5f * z, tanh, 0.5f * z);
}

template <typename T>
__device__ uint32_t packed(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 both = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    }
}

// What a lane needs to know of its columns of a chunk.
template <typename T, Form FORM>
struct Columns {
    float2 total[FORM == NORM ? 8 : 1], offset[8];

    __device__ __forceinline__ void read(const Operands<T>& given, int first) {
#pragma unroll
        for (int j = 0; j < 8; j++) read(given, first, j);
    }

    __device__ __forceinline__ void read(const Operands<T>& given, int first, int j) {
        first += threadIdx.x % 4 * 2;
        if constexpr (FORM == NORM) {
            total[j] = reinterpret_cast<const float2*>(given.total + first)[j * 4];
            offset[j] = reinterpret_cast<const float2*>(given.offset + first)[j * 4];
        } else if (given.bias != nullptr && first + j * 8 < given.n) {
            const auto pair = load<2>(given.bias + first, j * 4);
            offset[j] = {float(pair.values[0]), float(pair.values[1])};
        } else {
            offset[j] = {0.0f, 0.0f};
        }
    }
};

template <typename T, Form FORM>
__device__ __forceinline__ void multiply_all(uint32_t base, int warp, const CUtensorMap& y, const Operands<T>& given) {
    const int lane = threadIdx.x % 32, group = warp / 4;
    const int row = warp * 16;                     // of the tile; the lane has two, `lane / 4` and 8 more further on
    const bool apart = given.grid.steps > BEHIND;  // else the first group could be two tiles ahead
    const uint32_t out = base + OUT + warp * 2 * OUT_BYTES;
    // The lane's eight elements of 16×16, of rows of 64. The copy engine has put sixteenth i where i ^ row % 8 would be.
    const uint32_t eight = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    Ring ring(base);
    for (Tiles tile(given.grid); tile.left(); tile.next()) {
        float z[128];
        Sums sums;
        uint32_t before = 0;
        Columns<T, FORM> columns;
        // Behind the loop they are waited for. Together with the sums they would be too many registers.
        if constexpr (FORM != NORM) columns.read(given, tile.column());
        if (apart && group == 1) sync(1, 2 * GROUP_SIZE);
        for (int step = 0; step < given.grid.steps; step++) {
            wait(ring.full(), ring.parity);
            const uint64_t x = matrix(ring.x() + group * (X_BYTES / 2)), w = matrix(ring.w());
            if constexpr (FORM == NORM) {
                uint32_t own[K / 16][4];
#pragma unroll
                for (int part = 0; part < K / 16; part++) {
                    await_products<K / 16 - 1>();  // until the registers were read that it is loaded into
                    load_matrices(own[part], (ring.x() + row * K * 2 + eight) ^ part * 32);
                    begin_products();
                    multiply(z, own[part], w + 2 * part, step + part > 0);
                    end_products();
                    sums.add(own[part]);
                }
            } else {
                begin_products();
#pragma unroll
                for (int part = 0; part < K / 16; part++) multiply<T>(z, x + 2 * part, w + 2 * part, step + part > 0);
                end_products();
                await_products<1>();
            }
            if (step > 0 && lane < CLUSTER) arrive_at(before, lane);
            before = ring.empty();
            ring.next();
            if (apart && group == 0 && step == BEHIND) pass(1, 2 * GROUP_SIZE);
        }
        if constexpr (FORM == NORM) columns.read(given, tile.column()), sums.finish();
        await_products<0>();
        refresh(z);
        if (lane < CLUSTER) arrive_at(before, lane);

        float scale[2], shift[2];
        if constexpr (FORM == NORM) {
            float2 of[2];
            bool large = false;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float mean = sums.sum[half] * given.share;
                const float variance = fmaxf(sums.square[half] * given.share - mean * mean, 0.0f);
                large |= mean * mean > LARGE_MEAN * LARGE_MEAN * variance;
                of[half] = {mean, rsqrtf(variance + given.eps)};
            }
            if (__any_sync(0xffffffff, large)) {
                redo_centred(z, given, tile.row() + row + lane / 4, tile.column(), of);
                columns.read(given, tile.column());  // again, rather than be kept
            }
#pragma unroll
            for (int half = 0; half < 2; half++) scale[half] = of[half].y, shift[half] = -of[half].x * of[half].y;
        }

#pragma unroll
        for (int chunk = 0; chunk < N / CHUNK; chunk++) {
            uint32_t pairs[2][8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float* pair = z + (chunk * 8 + j) * 4 + half * 2;
                    if constexpr (FORM == NORM) {
                        pair[0] = fmaf(pair[0], scale[half], fmaf(shift[half], columns.total[j].x, columns.offset[j].x));
                        pair[1] = fmaf(pair[1], scale[half], fmaf(shift[half], columns.total[j].y, columns.offset[j].y));
                    } else {
                        pair[0] = gelu<T, FORM>(pair[0] + columns.offset[j].x);
                        pair[1] = gelu<T, FORM>(pair[1] + columns.offset[j].y);
                    }
                    pairs[half][j] = packed<T>(pair[0], pair[1]);
                }
                if (chunk + 1 < N / CHUNK) columns.read(given, tile.column() + (chunk + 1) * CHUNK, j);
            }
            const uint32_t buffer = out + chunk % 2 * OUT_BYTES;
            if (lane == 0) await_puts<1>();  // what was here; the chunk before may still be read
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                store_matrices((buffer + eight) ^ j * 16, pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1]);
            }
            publish_writes();
            __syncwarp();
            if (lane == 0) put(y, tile.column() + chunk * CHUNK, tile.row() + row, buffer);
        }
    }
    if (lane == 0) await_puts<0>();
}

template <typename T, Form FORM>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(BLOCK, 1) product(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap y,
    const __grid_constant__ Operands<T> given) {
    extern __shared__ uint8_t memory[];
    const uint32_t base = (address(memory) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        prefetch(x), prefetch(w), prefetch(y);
        for (int stage = 0; stage < STAGES; stage++) {
            make_barrier(base + FULL + stage * 8, 1);
            // w is fetched for both blocks, by whichever finds it done with in both.
            make_barrier(base + EMPTY + stage * 8, CLUSTER * MULTIPLIERS);
        }
        publish_barriers();
    }
    cluster_sync();
    let_next_begin();
    await_previous();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp >= MULTIPLIERS) {
        give_registers<24>();  // of 168 each: 128·24 + 256·240 = 384·168
        if (warp == MULTIPLIERS && threadIdx.x % 32 == 0) fetch_all(base, given.grid, x, w);
    } else {
        take_registers<240>();
        multiply_all<T, FORM>(base, warp, y, given);
    }
    cluster_sync();  // until nobody writes into the other block any more
}

// --- γ⊙w, its sums, and w·β + bias ---------------------------------------------------------------------------------

// A row a warp. Sums are of what was rounded, as the product sees it.
__global__ void fold(
    const __nv_bfloat16* w, const __nv_bfloat16* gamma, const __nv_bfloat16* beta, const __nv_bfloat16* bias,
    __nv_bfloat16* folded, float* totals, float* offsets, int n, int k, int64_t w_stride) {
    using Eight = Pack<__nv_bfloat16, 8>;
    let_next_begin();
    await_previous();
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n) return;
    w += row * w_stride;
    folded += int64_t(row) * k;
    float total = 0.0f, offset = 0.0f;
#pragma unroll 4
    for (int pack = lane; pack < k / 8; pack += 32) {
        Eight values = load<8>(w, pack), factors, summands;
        if (gamma != nullptr) factors = load<8>(gamma, pack);
        if (beta != nullptr) summands = load<8>(beta, pack);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float v = float(values.values[i]);
            if (beta != nullptr) offset = fmaf(v, float(summands.values[i]), offset);
            if (gamma != nullptr) values.values[i] = __nv_bfloat16(v * float(factors.values[i]));
            total += float(values.values[i]);
        }
        store<8>(folded, pack, values);
    }
    for (int step = 16; step > 0; step /= 2) {
        total += __shfl_xor_sync(0xffffffff, total, step);
        offset += __shfl_xor_sync(0xffffffff, offset, step);
    }
    if (lane == 0) {
        totals[row] = total;
        offsets[row] = offset + (bias == nullptr ? 0.0f : float(bias[row]));
    }
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

namespace {

// A matrix as the copy engine moves it: boxes of `rows` × 64 elements of 16 bits.
int describe(CUtensorMap& map, bool half, const void* matrix, int64_t height, int64_t width, int64_t stride, int rows) {
    static const auto encode = [] {  // not linked: a machine that only compiles has no driver
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }();
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(height)}, strides[] = {cuuint64_t(stride) * 2};
    const cuuint32_t box[] = {64, cuuint32_t(rows)}, every[] = {1, 1};
    return encode(
        &map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes,
        strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int pieces(int64_t size, int piece) { return int((size + piece - 1) / piece); }

// Its blocks may make ready while the kernel before ends.
template <typename... A, typename... P>
int launch_early(void (*kernel)(A...), int blocks, int threads, int shared, cudaStream_t stream, const P&... given) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, A(given)...);
}

template <typename T, Form FORM>
int launch(Operands<T> given, int64_t w_stride, void* y, cudaStream_t stream) {
    constexpr bool HALF = std::is_same_v<T, __half>;
    given.grid = {pieces(given.m, M * CLUSTER), pieces(given.n, N), pieces(given.k, K)};
    CUtensorMap maps[3];
    if (int status = describe(maps[0], HALF, given.x, given.m, given.k, given.x_stride, M)) return status;
    if (int status = describe(maps[1], HALF, given.w, given.n, given.k, w_stride, N / CLUSTER)) return status;
    if (int status = describe(maps[2], HALF, y, given.m, given.n, given.n, 16)) return status;
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int blocks = std::min(given.grid.down * given.grid.across, multiprocessors / CLUSTER) * CLUSTER;
    cudaFuncSetAttribute(product<T, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    return launch_early(product<T, FORM>, blocks, BLOCK, SHARED, stream, maps[0], maps[1], maps[2], given);
}

}  // namespace

// `folded` and `sums` are to work in, for γ⊙w, and for total and offset of its rows. There are as many rows as whole
// tiles have: of those beyond n nothing is written, and what they are does not matter.
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* folded, void* sums, void* y,
    int64_t m, int64_t n, int64_t k, int64_t x_stride, int64_t w_stride, double eps, cudaStream_t stream) {
    using T = __nv_bfloat16;
    float *total = (float*)sums, *offset = total + pieces(n, N) * N;
    if (int status = launch_early(
            fold, pieces(n, THREADS / 32), THREADS, 0, stream, (const T*)w, (const T*)gamma, (const T*)beta,
            (const T*)bias, (T*)folded, total, offset, int(n), int(k), w_stride)) {
        return status;
    }
    const Operands<T> given = {
        (const T*)x, (const T*)folded, nullptr, total, offset, x_stride, int(m), int(n), int(k), 1.0f / k,
        float(eps)};
    return launch<T, NORM>(given, k, y, stream);
}

extern "C" int linear_gelu(
    const void* x, const void* w, const void* bias, void* y, int64_t m, int64_t n, int64_t k, int64_t x_stride,
    int64_t w_stride, int64_t tanh, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)x, (const T*)w, (const T*)bias, nullptr, nullptr, x_stride, int(m), int(n), int(k), 0.0f, 0.0f};
        return tanh ? launch<T, TANH>(given, w_stride, y, stream) : launch<T, ERF>(given, w_stride, y, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

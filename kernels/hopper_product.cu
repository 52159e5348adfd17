// x·wᵀ on Hopper with the norm of x's rows before it, or GELU after it, at the rate of the product alone.
//
// A block is one to a multiprocessor and goes from tile to tile. One of its warps has the copy engine fetch steps of x
// and w into a ring of stages; two warpgroups multiply them, half of the tile's rows each. Two blocks, one above the
// other, share what is fetched of w.
//
// Products run on their own once begun. So before GELU a tile is only rounded when its last step is done, to half the
// registers, and finished sixteen columns a step while the next tile is multiplied. (Two warpgroups some steps apart,
// one finishing while the other multiplies, need more steps in shared memory than it holds beside those on their way:
// the one ahead waits for them until the other has caught up.)
//
// For a norm they take x into registers first, from where tensor cores read as well, and sum its rows there. Shared
// memory, which fetching and multiplying keep busy all the time, is read no more for it.
#include <algorithm>

#include "hopper.cuh"

namespace optexp::hopper {

enum Form { NORM, TANH, ERF };

constexpr int M = 128, N = 256, K = 64;  // of a tile and a step: 128 bytes of a row, as wide as a swizzle
constexpr int STAGES = 4;                // steps in shared memory
constexpr int CLUSTER = 2, GROUP = 8;    // blocks that share w, and clusters one above the other that share L2
constexpr int BLOCK = 384;
constexpr int MULTIPLIERS = 8;  // warps
constexpr int CHUNK = 64;       // columns that are written at once
constexpr int PARTS = N / 16;   // of a tile, in which it is finished

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
    const T *x, *w, *bias;  // no bias: null
    const float4* sums;     // of two rows of w: their sums, and what is added to their columns of y
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

template <typename T>
__device__ float2 unpacked(uint32_t both) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(both));
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
}

// The bias of a tile, of which a lane keeps two columns of each chunk, until lanes ask each other for those they need.
template <typename T>
struct Bias {
    uint32_t pairs[N / CHUNK];

    __device__ __forceinline__ Bias(const Operands<T>& given, int column) {
#pragma unroll
        for (int chunk = 0; chunk < N / CHUNK; chunk++) {
            const int first = column + chunk * CHUNK + threadIdx.x % 32 * 2;
            const bool there = given.bias != nullptr && first < given.n;
            pairs[chunk] = there ? *reinterpret_cast<const uint32_t*>(given.bias + first) : 0;
        }
    }

    // Of eight columns, those that the lane has in z.
    __device__ __forceinline__ float2 of(int j) const {
        return unpacked<T>(__shfl_sync(0xffffffff, pairs[j / 8], j % 8 * 4 + threadIdx.x % 4));
    }
};

// A warp's 16 rows of a tile of y, written in parts of 16 columns, whose chunks the copy engine takes.
struct Rows {
    const CUtensorMap& y;
    const uint32_t buffers;  // two
    // The lane's eight elements of 16×16, of rows of 64. The copy engine puts sixteenth i where i ^ row % 8 would be.
    const uint32_t eight = threadIdx.x % 16 * 128 + (threadIdx.x % 32 / 16 ^ threadIdx.x % 8) * 16;
    int row, column;

    __device__ __forceinline__ Rows(const CUtensorMap& y, uint32_t buffers) : y(y), buffers(buffers) {}

    // Pairs of eight columns, in the upper and in the lower rows, and of the next eight.
    __device__ __forceinline__ void write(int part, const uint32_t (&pairs)[4]) const {
        constexpr int LAST = CHUNK / 16 - 1;
        const int chunk = part / (CHUNK / 16), of_chunk = part % (CHUNK / 16);
        const bool first_lane = threadIdx.x % 32 == 0;
        const uint32_t buffer = buffers + chunk % 2 * OUT_BYTES;
        if (of_chunk == 0) {
            if (first_lane) await_puts<1>();  // what was here; the chunk before may still be read
            __syncwarp();
        }
        store_matrices((buffer + eight) ^ of_chunk * 32, pairs[0], pairs[1], pairs[2], pairs[3]);
        if (of_chunk == LAST) {
            publish_writes();
            __syncwarp();
            if (first_lane) put(y, column + chunk * CHUNK, row, buffer);
        }
    }
};

// The same before GELU, rounded as a product and GELU apart would: half as many registers as the tile had.
template <typename T, Form FORM>
struct Held : Rows {
    uint32_t pairs[PARTS][4] = {};
    int next = PARTS;  // nothing is held yet

    using Rows::Rows;

    __device__ __forceinline__ void take(const float (&z)[128], const Bias<T>& bias) {
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float2 more = bias.of(j);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* pair = z + j * 4 + half * 2;
                pairs[j / 2][j % 2 * 2 + half] = packed<T>(pair[0] + more.x, pair[1] + more.y);
            }
        }
        next = 0;
    }

    __device__ __forceinline__ void finish(int part) const {
        uint32_t done[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t both = pairs[part][i];
            asm volatile("" : "+r"(both));  // else all parts begin at once: too many registers
            const float2 z = unpacked<T>(both);
            done[i] = packed<T>(gelu<T, FORM>(z.x), gelu<T, FORM>(z.y));
        }
        write(part, done);
    }

    // Registers have no computed numbers. By halves: a row of sixteen branches, each far from the last, is slow.
    template <int FIRST = 0, int COUNT = PARTS>
    __device__ __forceinline__ void finish_next() {
        if constexpr (COUNT == 1) {
            finish(FIRST);
            next++;
        } else if (next < FIRST + COUNT / 2) {
            finish_next<FIRST, COUNT / 2>();
        } else {
            finish_next<FIRST + COUNT / 2, COUNT / 2>();
        }
    }

    __device__ __forceinline__ void finish_all() const {
#pragma unroll
        for (int part = 0; part < PARTS; part++) finish(part);
    }
};

// Of a chunk, what a lane needs of its columns.
struct Columns {
    float4 sums[8];

    // Brings those of a whole tile near, 32 bytes a lane and time.
    template <typename T>
    static __device__ __forceinline__ void announce(const Operands<T>& given, int column) {
#pragma unroll
        for (int i = 0; i < N * 8; i += 32 * 32) {
            const float4* at = given.sums + (column * 8 + i + threadIdx.x % 32 * 32) / 16;
            asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
        }
    }

    template <typename T>
    __device__ __forceinline__ void read(const Operands<T>& given, int first, int j) {
        sums[j] = given.sums[first / 2 + j * 4 + threadIdx.x % 4];
    }

    template <typename T>
    __device__ __forceinline__ void read(const Operands<T>& given, int first) {
#pragma unroll
        for (int j = 0; j < 8; j++) read(given, first, j);
    }
};

// The norm of a tile, from the first chunk's columns on.
template <typename T>
__device__ __forceinline__ void normalise(
    float (&z)[128], const Sums& sums, Columns& columns, const Operands<T>& given, const Rows& rows) {
    float2 of[2];  // mean and 1/deviation
    bool large = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float mean = sums.sum[half] * given.share;
        const float variance = fmaxf(sums.square[half] * given.share - mean * mean, 0.0f);
        large |= mean * mean > LARGE_MEAN * LARGE_MEAN * variance;
        of[half] = {mean, rsqrtf(variance + given.eps)};
    }
    if (__any_sync(0xffffffff, large)) {
        redo_centred(z, given, rows.row + threadIdx.x % 32 / 4, rows.column, of);
        columns.read(given, rows.column);  // again, rather than be kept
    }
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float4 own = columns.sums[j % 8];
        if (j + 8 < N / 8) columns.read(given, rows.column + (j / 8 + 1) * CHUNK, j % 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* pair = z + j * 4 + half * 2;
            const float scale = of[half].y, shift = -of[half].x * scale;
            pairs[j % 2 * 2 + half] = packed<T>(
                fmaf(pair[0], scale, fmaf(shift, own.x, own.z)), fmaf(pair[1], scale, fmaf(shift, own.y, own.w)));
        }
        if (j % 2 == 1) rows.write(j / 2, pairs);
    }
}

template <typename T, Form FORM>
__device__ __forceinline__ void multiply_all(uint32_t base, int warp, const CUtensorMap& y, const Operands<T>& given) {
    const int lane = threadIdx.x % 32, group = warp / 4;
    const int row = warp * 16;  // of the tile; the lane has two, `lane / 4` and 8 more further on
    std::conditional_t<FORM == NORM, Rows, Held<T, FORM>> rows(y, base + OUT + warp * 2 * OUT_BYTES);
    Ring ring(base);
    for (Tiles tile(given.grid); tile.left(); tile.next()) {
        float z[128];
        Sums sums;
        uint32_t before = 0;
        const int column = tile.column();
        const Bias<T> bias(given, column);
        if constexpr (FORM == NORM) Columns::announce(given, column);
        for (int step = 0; step < given.grid.steps; step++) {
            wait(ring.full(), ring.parity);
            const uint64_t x = matrix(ring.x() + group * (X_BYTES / 2)), w = matrix(ring.w());
            if constexpr (FORM == NORM) {
                uint32_t own[K / 16][4];
#pragma unroll
                for (int part = 0; part < K / 16; part++) {
                    await_products<K / 16 - 1>();  // until the registers were read that it is loaded into
                    load_matrices(own[part], (ring.x() + row * K * 2 + rows.eight) ^ part * 32);
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
                if (rows.next < PARTS) rows.finish_next();
                await_products<1>();
            }
            if (step > 0 && lane < CLUSTER) arrive_at(before, lane);
            before = ring.empty();
            ring.next();
        }
        Columns columns;
        if constexpr (FORM == NORM) columns.read(given, column), sums.finish();
        await_products<0>();
        refresh(z);
        if (lane < CLUSTER) arrive_at(before, lane);
        if constexpr (FORM != NORM) {
            while (rows.next < PARTS) rows.finish_next();  // there were fewer steps
            rows.take(z, bias);
        }
        rows.row = tile.row() + row, rows.column = column;
        if constexpr (FORM == NORM) normalise(z, sums, columns, given, rows);
    }
    if constexpr (FORM != NORM) rows.finish_all();  // of the last tile, without anything beside it
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

// A row a warp. Sums are of what was rounded, as the product sees it. Several packs are read before one is written: for
// all the compiler knows, it is of what is read later. In words of 32 bits, or each value would take such a register.
__global__ void __launch_bounds__(THREADS, 4) fold(
    const __nv_bfloat16* w, const __nv_bfloat16* gamma, const __nv_bfloat16* beta, const __nv_bfloat16* bias,
    __nv_bfloat16* folded, float* sums, int n, int k, int64_t w_stride) {
    using T = __nv_bfloat16;
    using Eight = Pack<uint32_t, 4>;
    constexpr int PACKS = 4;
    constexpr uint32_t ONES = 0x3f803f80;
    let_next_begin();
    await_previous();
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n) return;
    const auto* from = reinterpret_cast<const Eight*>(w + row * w_stride);
    auto* to = reinterpret_cast<Eight*>(folded + int64_t(row) * k);
    const auto *factor = reinterpret_cast<const Eight*>(gamma), *summand = reinterpret_cast<const Eight*>(beta);
    float total = 0.0f, offset = 0.0f;
    for (int first = lane; first < k / 8; first += 32 * PACKS) {
        Eight values[PACKS], factors[PACKS], summands[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            const int pack = min(first + i * 32, k / 8 - 1);
            values[i] = from[pack];
            factors[i] = factor == nullptr ? Eight{ONES, ONES, ONES, ONES} : factor[pack];
            summands[i] = summand == nullptr ? Eight{} : summand[pack];
        }
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            if (first + i * 32 >= k / 8) break;
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                uint32_t& both = values[i].values[pair];
                const float2 v = unpacked<T>(both), by = unpacked<T>(factors[i].values[pair]);
                const float2 with = unpacked<T>(summands[i].values[pair]);
                offset = fmaf(v.x, with.x, fmaf(v.y, with.y, offset));
                both = packed<T>(v.x * by.x, v.y * by.y);
                const float2 product = unpacked<T>(both);
                total += product.x + product.y;
            }
            to[first + i * 32] = values[i];
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        total += __shfl_xor_sync(0xffffffff, total, step);
        offset += __shfl_xor_sync(0xffffffff, offset, step);
    }
    if (lane == 0) {
        sums += row / 2 * 4 + row % 2;  // as a float4 has those of two rows
        sums[0] = total;
        sums[2] = offset + (bias == nullptr ? 0.0f : float(bias[row]));
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
    // As much shared memory as the product has: else multiprocessors stop to share theirs out anew.
    cudaFuncSetAttribute(fold, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (int status = launch_early(
            fold, pieces(n, THREADS / 32), THREADS, 0, stream, (const T*)w, (const T*)gamma, (const T*)beta,
            (const T*)bias, (T*)folded, (float*)sums, int(n), int(k), w_stride)) {
        return status;
    }
    const Operands<T> given = {
        (const T*)x, (const T*)folded, nullptr, (const float4*)sums, x_stride, int(m), int(n), int(k), 1.0f / k,
        float(eps)};
    return launch<T, NORM>(given, k, y, stream);
}

extern "C" int linear_gelu(
    const void* x, const void* w, const void* bias, void* y, int64_t m, int64_t n, int64_t k, int64_t x_stride,
    int64_t w_stride, int64_t tanh, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)x, (const T*)w, (const T*)bias, nullptr, x_stride, int(m), int(n), int(k), 0.0f, 0.0f};
        return tanh ? launch<T, TANH>(given, w_stride, y, stream) : launch<T, ERF>(given, w_stride, y, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

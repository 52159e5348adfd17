// x·wᵀ on Hopper with the norm of x's rows before it, or GELU after it, at the rate of the GEMM alone.
//
// A block is one to a multiprocessor and goes from tile to tile. One of its warps has the copy engine fetch steps of x
// and w into a ring of stages; two warpgroups multiply them, half of the tile's rows each. Two blocks, one above the
// other, share what is fetched of w.
//
// wgmma runs asynchronously. So before GELU a tile is only rounded when its last step is done, to half the
// registers, and finished sixteen columns a step while the next tile is multiplied. (Two warpgroups some steps apart,
// one finishing while the other multiplies, need more steps in shared memory than it holds beside those on their way:
// the one ahead waits for them until the other has caught up.)
//
// For a norm they take x into registers first, from where tensor cores read as well, and sum its rows there. Shared
// memory, which fetching and multiplying keep busy all the time, is read no more for it. With μ and r the mean and
// 1/deviation of a row, and c near μ:
//
//     y = r·((x − c)⊙γ)·wᵀ − r·(μ − c)·Σγw + (Σβw + bias)
//
// All four are summed once, and shared with the other blocks through a workspace in memory.
//
// μ and r belong to a row of x. Where each row has many tiles, two warps of each block that multiply nothing sum rows, in
// the order in which tiles come to them, and all tiles look at their end. Where it has few, these warps would not keep up.
// Then of each panel of rows the tiles of the first columns come first. They sum, and so do tiles that are made in the same
// round; all others look at their end, a tile's time later.
//
// Both sums over w belong to a column of y. Tiles seldom come out even: in the last round some clusters would have none.
// So the first clusters sum columns in place of a tile, while others make their first. Where all have a tile in each
// round, a small kernel before sums them, which costs some 3 µs.
//
// Where such a sum is not finite, as with an infinite weight, it would cancel what is infinite in the GEMM, too. So there
// a column is made again as norm and GEMM one after the other make it, slowly.
//
// A block sums from memory what the workspace lacks: it never waits without end for another block, which may not have
// begun.
// (Two GEMMs side by side, each with blocks that wait for others of theirs, could wait for ever.) What a tile finds
// are the bits that it would have summed itself, so that y does not depend on who was first.
#include <algorithm>

#include "stream_workspace.cuh"
#include "hopper.cuh"

namespace optexp::hopper {

enum Form { NORM, TANH, ERF };

constexpr int M = 128, N = 256, K = 64;  // of a tile and a step: 128 bytes of a row, as wide as a swizzle
constexpr int STAGES = 4;                // steps in shared memory
constexpr int CLUSTER = ARRIVALS == 1 ? 2 : 1;  // blocks that share w; racecheck does not see arrivals from others
constexpr int GROUP = 8;                        // clusters one above the other that share L2
constexpr int PANEL = 32;                // clusters one above the other, whose rows are summed first
constexpr int GROUP_APART = 4;           // where rows are summed apart: fewer, as those of the first round must soon be told
constexpr int MANY_TILES = 8;            // of a row, for which summing apart keeps up
constexpr int BLOCK = 384;
constexpr int MMA_WARPS = 8, STATS_WARPS = 2;  // issue wgmma; sum rows
constexpr int CHUNK = 64;                    // columns that are written at once
constexpr int PARTS = N / 16;                // of a tile, in which it is finished

constexpr int X_BYTES = M * K * 2, W_BYTES = N * K * 2, STAGE = X_BYTES + W_BYTES;
constexpr int OUT = STAGES * STAGE, OUT_BYTES = 16 * CHUNK * 2;  // two for each warp
constexpr int GAMMA = OUT + 2 * MMA_WARPS * OUT_BYTES, GAMMA_BYTES = K * 2;
constexpr int COLUMNS = GAMMA + STAGES * GAMMA_BYTES, COLUMNS_BYTES = N * 8;
constexpr int FULL = COLUMNS + COLUMNS_BYTES, EMPTY = FULL + STAGES * 8, COLUMNS_READ = EMPTY + STAGES * 8;
constexpr int COLUMNS_FULL = COLUMNS_READ + 8, COLUMNS_KNOWN = COLUMNS_FULL + 8, ENROLLED = COLUMNS_KNOWN + 8;
constexpr int EPOCH = ENROLLED + 8, KIND = EPOCH + 4, MAX_POLLS = KIND + 4, SHARED = MAX_POLLS + MMA_WARPS * 4;
static_assert(SHARED <= 227 * 1024);

constexpr uint32_t ONES = 0x3f803f80;  // two of bfloat16
constexpr float FAR = 2.0f;            // deviations between a row's mean and what was taken for it

// --- the workspace -------------------------------------------------------------------------------------------------

struct __align__(16) Row {
    float mean, scale;  // as a `Norm` has them
    uint32_t epoch;
    int row;
};

// The sums that blocks share. Zero-initialised; persists between launches. A launch must not begin before the one before
// has ended: its epoch marks the sums that it wrote.
struct StreamWorkspace {
    static constexpr uint32_t SEATS = 4096;              // more than a launch has blocks
    static constexpr int ROWS = 32768, COLUMNS = 16384;  // rows of x take turns, where they are more

    uint64_t enrolled;           // blocks of all launches, rounded up to SEATS for each
    uint32_t told[COLUMNS / N];  // the epoch, where a tile's columns are there
    __align__(16) uint2 columns[COLUMNS];
    Row rows[ROWS];

    // Which launch this is, from 1 on. Every block comes once.
    __device__ uint32_t enrol() {
        const uint64_t seats = blockIdx.x == 0 ? SEATS + 1 - gridDim.x : 1;
        return uint32_t(take(&enrolled, seats) / SEATS) + 1;
    }

    __device__ Row* row(int row) { return rows + row % ROWS; }
};

// --- which tile, and which stage -----------------------------------------------------------------------------------

struct Grid {
    int down, across, steps;  // clusters one above the other, and side by side
    unsigned summing;         // the first clusters, which sum columns before they make tiles
    bool apart;               // rows are summed by warps that multiply nothing, and not by tiles
};

template <typename T>
struct Operands {
    const T *x, *w, *bias, *gamma, *beta;  // null where there is none
    const uint2* columns;  // of each row of w, as `sum_columns` has them
    StreamWorkspace* workspace;  // null where there is no memory for one: then no block polls
    int64_t x_stride, w_stride;
    int m, n, k;
    float share, eps;  // 1/k
    int max_polls;     // polls of the workspace for a sum that is missing; 0: the workspace is not read
    Grid grid;
};

struct Tile {
    int row, column;
    int sums;  // 1: it sums its rows, whose sums no earlier tile has shared

    // Now, and not only when it is wanted.
    __device__ __forceinline__ void settle() { asm volatile("" : "+r"(row), "+r"(column), "+r"(sums)); }
};

// The tiles of a block, of which those of a cluster are one above the other: by groups of rows, in these by columns. Where
// tiles sum rows, these are in panels, where tiles of the first columns come before all others: all rows at once would
// have all of x read in the first round, as fast as memory is.
template <Form FORM>
struct Tiles {
    const Grid& grid;
    int turn;  // those in which columns are summed counted, too

    __device__ explicit Tiles(const Grid& grid) : grid(grid), turn((blockIdx.x + (sums(grid) ? gridDim.x : 0)) / CLUSTER) {}
    __device__ static bool sums(const Grid& grid) { return FORM == NORM && blockIdx.x / CLUSTER < grid.summing; }
    __device__ bool left() const { return turn < int(grid.summing) + grid.down * grid.across; }
    __device__ void next() { turn += gridDim.x / CLUSTER; }

    // Divisions take long: best beside wgmma.
    __device__ Tile tile() const {
        const bool panels = FORM == NORM && !grid.apart;
        const int group = FORM == NORM && grid.apart ? GROUP_APART : GROUP, alone = panels;  // columns that come first
        const int cluster = turn - int(grid.summing);
        const int top = panels ? cluster / (PANEL * grid.across) * PANEL : 0, before = top * grid.across;
        const int tall = panels ? min(grid.down - top, PANEL) : grid.down;
        const int round = turn - int(blockIdx.x / CLUSTER + grid.summing);  // its first
        int down = cluster - before, across = 0;
        bool sums = panels;
        if (!alone || down >= tall) {
            const int of_others = down - tall * alone, columns = grid.across - alone;
            const int first = of_others / (group * columns) * group, of_group = of_others - first * columns;
            const int height = min(tall - first, group);
            across = of_group / height;
            down = first + of_group - across * height;
            across += alone;
            sums = panels && before + down >= round;
        }
        return {((top + down) * CLUSTER + int(cluster_rank())) * M, across * N, sums};
    }
};

struct Ring {
    uint32_t base;
    int stage;
    uint32_t parity;

    __device__ explicit Ring(uint32_t base, int steps = 0)  // after so many
        : base(base), stage(steps % STAGES), parity(steps / STAGES % 2) {}
    __device__ uint32_t x() const { return base + stage * STAGE; }
    __device__ uint32_t w() const { return x() + X_BYTES; }
    __device__ uint32_t gamma() const { return base + GAMMA + stage * GAMMA_BYTES; }
    __device__ uint32_t full() const { return base + FULL + stage * 8; }
    __device__ uint32_t empty() const { return base + EMPTY + stage * 8; }
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// --- pairs of 16 bits ----------------------------------------------------------------------------------------------

using Eight = Pack<uint32_t, 4>;  // of 16 bits each

__device__ __forceinline__ uint32_t twice(float value) {
    const __nv_bfloat162 both = __float2bfloat162_rn(value);
    return reinterpret_cast<const uint32_t&>(both);
}

__device__ __forceinline__ uint32_t minus(uint32_t a, uint32_t b) {
    uint32_t both;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b, uint32_t plus = 0) {
    uint32_t both;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(plus));
    return both;
}

// --- mean and deviation --------------------------------------------------------------------------------------------

// Over so many lanes side by side.
template <int COUNT>
__device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}

__device__ __forceinline__ float mean_of(float sum, float share) { return __fmul_rn(sum, share); }  // rounded, as it is told

// Squares that overflow leave a scale of 0, as F.layer_norm does: fmaf does not overflow before it subtracts.
__device__ __forceinline__ float scale_of(float mean, float square, float share, float eps) {
    const float variance = fmaf(-mean, mean, square * share);
    return rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);  // NaN stays
}

// Of the two rows of which a lane has elements, as a wgmma operand has them, even registers and odd ones: how far
// the mean is from what was taken for it, and 1/deviation. In the workspace a row is one word: nothing has to be ordered.
struct Norm {
    float mean[2], scale[2];

    __device__ __forceinline__ float distance(int half) const { return mean[half] * scale[half]; }  // in deviations

    __device__ __forceinline__ bool far() const { return fmaxf(fabsf(distance(0)), fabsf(distance(1))) > FAR; }

    // What was taken for the means, by what they are.
    __device__ __forceinline__ void correct(uint32_t (&means)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) means[half] = twice(unpacked<__nv_bfloat16>(means[half]).x + mean[half]);
    }

    __device__ __forceinline__ void tell(StreamWorkspace& workspace, uint32_t epoch, int row) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Row own = {mean[half], scale[half], epoch, row + half * 8};
            post(workspace.row(own.row), own);
        }
    }
};

// The workspace's entries of the same rows. The load takes long: only `found` waits for it.
struct Told {
    Row rows[2];

    __device__ __forceinline__ void look(StreamWorkspace& workspace, int row) {
#pragma unroll
        for (int half = 0; half < 2; half++) rows[half] = peek(workspace.row(row + half * 8));
    }

    __device__ __forceinline__ bool found(Norm& norm, uint32_t epoch, int row) const {
        bool found = true;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            norm.mean[half] = rows[half].mean, norm.scale[half] = rows[half].scale;
            found &= rows[half].epoch == epoch && rows[half].row == row + half * 8;
        }
        return found;
    }
};

// Of the same rows.
struct Sums {
    float sum[2] = {}, square[2] = {};

    __device__ __forceinline__ void add(const uint32_t (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 both = unpacked<__nv_bfloat16>(x[i]);
            sum[i % 2] += both.x;
            square[i % 2] = fmaf(both.x, both.x, square[i % 2]);
            sum[i % 2] += both.y;
            square[i % 2] = fmaf(both.y, both.y, square[i % 2]);
        }
    }

    // 0, for what has to come after the sums: the compiler does not know that `zero` is none other.
    __device__ __forceinline__ uint32_t settled(uint32_t zero) const {
        uint32_t all = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) all |= __float_as_uint(sum[half]) | __float_as_uint(square[half]);
        return all & zero;
    }

    __device__ __forceinline__ Norm norm(float share, float eps) const {
        Norm norm;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            norm.mean[half] = mean_of(over_lanes<4>(sum[half]), share);
            norm.scale[half] = scale_of(norm.mean[half], over_lanes<4>(square[half]), share, eps);
        }
        return norm;
    }
};

// Of four of a row's first 16 columns.
__device__ __forceinline__ float mean_of_four(uint32_t pair, uint32_t next_pair) {
    const float2 one = unpacked<__nv_bfloat16>(pair), two = unpacked<__nv_bfloat16>(next_pair);
    return (one.x + one.y + two.x + two.y) * 0.25f;
}

// What a row's mean may be: of four such means the nearest to 0, or 0 between them. So a mean that is small beside the
// deviation is left alone, and x exact; and one channel far from all others is no mean.
__device__ __forceinline__ uint32_t nearest_to_zero(float lowest, float highest) {
    return twice(fmaxf(lowest, fminf(highest, 0.0f)));
}

// The same of a lane's two rows, whose columns four lanes have between them.
__device__ __forceinline__ void guess_means(uint32_t (&means)[2], const uint32_t (&x)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float lowest = mean_of_four(x[half], x[half + 2]), highest = lowest;
        for (int step = 1; step <= 2; step *= 2) {
            lowest = fminf(lowest, __shfl_xor_sync(0xffffffff, lowest, step));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
        }
        means[half] = nearest_to_zero(lowest, highest);
    }
}

// A warp's 16 rows, in the order in which they are summed beside wgmma, to the bit.
template <typename T>
__device__ __forceinline__ Norm sum_from_memory(uint32_t mean, uint32_t other_mean, const Operands<T>& given, int row) {
    const int lane = threadIdx.x % 32;
    const uint32_t means[2] = {mean, other_mean};
    const T* x_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        x_row[half] = given.x + min(row + half * 8, given.m - 1) * given.x_stride + lane % 4 * 2;
    }
    Sums sums;
#pragma unroll 4
    for (int first = 0; first < given.k; first += 16) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = first + i / 2 * 8;
            const bool there = row + i % 2 * 8 < given.m && column + lane % 4 * 2 < given.k;  // else filled up with zeros
            x[i] = minus(there ? *reinterpret_cast<const uint32_t*>(x_row[i % 2] + column) : 0, means[i % 2]);
        }
        sums.add(x);
    }
    return sums.norm(given.share, given.eps);
}

// Four rows from memory, of which eight lanes have each, in an order of their own; the workspace gets them, where there is one.
template <int AHEAD, typename T>
__device__ __forceinline__ Row tell_four(const Operands<T>& given, uint32_t epoch, int first) {
    const int own = threadIdx.x % 8, packs = given.k / 8, row = first + threadIdx.x % 32 / 8;
    const auto* from = reinterpret_cast<const Eight*>(given.x + min(row, given.m - 1) * given.x_stride);
    uint32_t mean = 0;
    if (given.k % K == 0) {  // as where it is multiplied
        const Eight one = from[0], two = from[1];
        float lowest = mean_of_four(one.values[0], two.values[0]), highest = lowest;
#pragma unroll
        for (int i = 1; i < 4; i++) {
            const float next = mean_of_four(one.values[i], two.values[i]);
            lowest = fminf(lowest, next), highest = fmaxf(highest, next);
        }
        mean = nearest_to_zero(lowest, highest);
    }
    float sum = 0.0f, square = 0.0f;
#pragma unroll 1
    for (int pack = own; pack < packs; pack += 8 * AHEAD) {
        Eight x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) x[i] = pack + i * 8 < packs ? from[pack + i * 8] : Eight{mean, mean, mean, mean};
#pragma unroll
        for (int i = 0; i < AHEAD * 4; i++) {
            const float2 both = unpacked<__nv_bfloat16>(minus(x[i / 4].values[i % 4], mean));
            sum = sum + both.x + both.y;
            square = fmaf(both.y, both.y, fmaf(both.x, both.x, square));
        }
    }
    Row told = {mean_of(over_lanes<8>(sum), given.share), 0.0f, epoch, row};
    told.scale = scale_of(told.mean, over_lanes<8>(square), given.share, given.eps);
    if (own == 0 && given.workspace != nullptr) post(given.workspace->row(row), told);
    return told;
}

// A warp's share of all rows, in the order in which tiles come to them, beside the wgmma of others.
template <typename T>
__device__ void tell_rows(uint32_t base, int stats_warp, const Operands<T>& given) {
    wait(base + ENROLLED, 0);
    const uint32_t epoch = load_shared(base + EPOCH);
    const int first = (blockIdx.x * STATS_WARPS + stats_warp) * 4, all = given.grid.down * CLUSTER * M;
    for (int row = first; row < all; row += gridDim.x * STATS_WARPS * 4) tell_four<4>(given, epoch, row);
}

// A warp's 16 rows, which the workspace lacks: a warp that polled in vain sums them, and does not poll again.
template <typename T>
__device__ __forceinline__ Norm await_rows(uint32_t base, const Operands<T>& given, int first) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    const uint32_t epoch = load_shared(base + EPOCH);
    Norm norm;
    Told told;
    const auto max_polls_address = [&] { return base + MAX_POLLS + threadIdx.x / 32 * 4; };
    const int max_polls = __shfl_sync(0xffffffff, load_shared(max_polls_address()), 0);  // uniform: else registers spill
    for (int look = 0; look < max_polls; look++) {
        told.look(*given.workspace, row);
        if (__all_sync(0xffffffff, told.found(norm, epoch, row))) return norm;
    }
    __syncwarp();
    store_shared(max_polls_address(), 0u);
#pragma unroll 1
    for (int of = 0; of < 16; of += 4) {
        const Row own = tell_four<1>(given, epoch, first + of);
        const float mean = __shfl_sync(0xffffffff, own.mean, lane / 4 % 4 * 8);
        const float scale = __shfl_sync(0xffffffff, own.scale, lane / 4 % 4 * 8);
        if (lane / 16 != of / 4 % 2) continue;
        if (of < 8) {
            norm.mean[0] = mean, norm.scale[0] = scale;
        } else {
            norm.mean[1] = mean, norm.scale[1] = scale;
        }
    }
    return norm;
}

// A warp's 16 rows once more, from memory and with their true means: far from these, rounding x − c costs too much. Of
// 32 columns a lane takes eight in a row, of all operands: in which order they are multiplied does not matter.
template <typename T>
__device__ __forceinline__ void redo(
    float (&z)[128], Norm& norm, const uint32_t (&means)[2], const Operands<T>& given, int row, int column) {
    const int lane = threadIdx.x % 32;
    const T* x_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) x_row[half] = given.x + min(row + half * 8, given.m - 1) * given.x_stride;
    Sums sums;
#pragma unroll
    for (int i = 0; i < 128; i++) z[i] = 0.0f;
    const T* w_first = given.w + (column + lane / 4) * given.w_stride;
#pragma unroll 1  // else there are not enough registers
    for (int inner = lane % 4 * 8; inner < (given.k + 31) / 32 * 32; inner += 32) {
        const int from = min(inner, given.k - 8);  // beyond, x is zero
        Eight x[2] = {}, gamma = {ONES, ONES, ONES, ONES};
        if (given.gamma != nullptr) gamma = load<4>(reinterpret_cast<const uint32_t*>(given.gamma + from), 0);
        if (inner < given.k) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                x[half] = load<4>(reinterpret_cast<const uint32_t*>(x_row[half] + inner), 0);
                for (uint32_t& pair : x[half].values) pair = minus(pair, means[half]);
            }
        }
        uint32_t own[2][4];
#pragma unroll
        for (int part = 0; part < 2; part++) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[part][i] = x[i % 2].values[part * 2 + i / 2];
            sums.add(own[part]);
#pragma unroll
            for (int i = 0; i < 4; i++) own[part][i] = times(own[part][i], gamma.values[part * 2 + i / 2]);
        }
        const T* w_row = w_first + from;
#pragma unroll
        for (int j = 0; j < N / 8; j++, w_row += 8 * given.w_stride) {
            asm volatile("" : "+l"(w_row));  // else 32 of them are kept in registers
            if (column + j * 8 >= given.n) continue;
            const uint4 w = *reinterpret_cast<const uint4*>(w_row);
            multiply_few<__nv_bfloat16>(z + 4 * j, own[0], w.x, w.y);
            multiply_few<__nv_bfloat16>(z + 4 * j, own[1], w.z, w.w);
        }
    }
    norm = sums.norm(given.share, given.eps);
}

// --- sums over rows of w -------------------------------------------------------------------------------------------

// Rounded, and what that leaves.
__device__ __forceinline__ uint32_t split(float value) {
    const float high = __bfloat162float(__float2bfloat16_rn(value));
    return packed<__nv_bfloat16>(high, isfinite(high) ? value - high : 0.0f);
}

// In place of both sums of a column where one is not finite, as with an infinite weight: twice 0, and the other zero as a
// mark. They would cancel what is infinite in the GEMM.
constexpr uint2 ENDLESS = {0x80000000, 0};

// Σγw, and Σβw + bias, of a row of w by eight lanes, of which each takes every eighth eight of its elements: always in the
// same order.
struct ColumnSums {
    float factor = 0.0f, offset = 0.0f;

    __device__ __forceinline__ void add(const Eight& w, const Eight& gamma, const Eight& beta) {
        using T = __nv_bfloat16;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpacked<T>(w.values[i]), f = unpacked<T>(gamma.values[i]), o = unpacked<T>(beta.values[i]);
            factor = fmaf(v.x, f.x, fmaf(v.y, f.y, factor));
            offset = fmaf(v.x, o.x, fmaf(v.y, o.y, offset));
        }
    }

    // As each of the eight lanes knows them then.
    template <typename T>
    __device__ __forceinline__ uint2 all(const Operands<T>& given, int row) {
        for (int step = 1; step < 8; step *= 2) {
            factor += __shfl_xor_sync(0xffffffff, factor, step);
            offset += __shfl_xor_sync(0xffffffff, offset, step);
        }
        const float bias = given.bias != nullptr && row < given.n ? float(given.bias[row]) : 0.0f;
        const bool finite = isfinite(factor) && isfinite(offset);
        return finite ? uint2{split(factor), split(offset + bias)} : ENDLESS;
    }
};

constexpr int OWN = N / MMA_WARPS;  // columns of a tile, of a warp

// Of four rows of w by a warp, from memory.
template <int AHEAD, typename T>
__device__ __forceinline__ uint2 sum_columns(const Operands<T>& given, int row) {
    const int packs = given.k / 8;
    const auto* from = reinterpret_cast<const Eight*>(given.w + min(row, given.n - 1) * given.w_stride);
    const auto *factors = reinterpret_cast<const Eight*>(given.gamma), *summands = reinterpret_cast<const Eight*>(given.beta);
    ColumnSums sums;
#pragma unroll 1
    for (int first = threadIdx.x % 8; first < packs; first += 8 * AHEAD) {
        Eight w[AHEAD], gamma[AHEAD], beta[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int pack = min(first + i * 8, packs - 1);
            w[i] = from[pack];
            gamma[i] = factors == nullptr ? Eight{ONES, ONES, ONES, ONES} : factors[pack];
            beta[i] = summands == nullptr ? Eight{} : summands[pack];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (first + i * 8 < packs) sums.add(w[i], gamma[i], beta[i]);
        }
    }
    return sums.all(given, row);
}

// Of all, by a kernel of its own. The GEMM may begin on multiprocessors that are done with their rows.
constexpr int FEW = 64;  // threads, so that a small w is read by many multiprocessors
template <typename T>
__global__ void __launch_bounds__(FEW) sum_all_columns(const __grid_constant__ Operands<T> given, uint2* columns) {
    await_previous();
    let_next_begin();  // only now: the GEMM reads x and w at once
    const int row = blockIdx.x * (FEW / 8) + threadIdx.x / 8;
    const uint2 sums = sum_columns<8>(given, row);
    if (threadIdx.x % 8 == 0 && row < given.n) columns[row] = sums;
}

// Whether a tile has such a column, as all of a warp ask together.
__device__ __forceinline__ bool any_endless(uint32_t base) {
    bool endless = false;
    for (int pair = threadIdx.x % 32; pair < N / 2; pair += 32) {
        const uint4 both = load_shared_16<uint4>(base + COLUMNS + pair * 16);
        endless |= both.x == ENDLESS.x || both.z == ENDLESS.x;
    }
    return __any_sync(0xffffffff, endless);
}

// Such columns, as norm and GEMM one after the other have them: an element after the other by the lane that has it. The
// rest is scaled here, as a scale of 0 would spoil them. x may be as near its mean as float32 can tell, so that is summed
// anew: what is left of x − c is rounded.
template <typename T>
__device__ __forceinline__ void make_endless(
    float (&z)[128], Norm& norm, uint32_t columns, const Operands<T>& given, int row, int column) {
    const int first = threadIdx.x % 4 * 2;
    const T* const x_row[2] = {
        given.x + min(row, given.m - 1) * given.x_stride, given.x + min(row + 8, given.m - 1) * given.x_stride};
    float mean[2] = {};
#pragma unroll 1
    for (int i = 0; i < given.k; i++) mean[0] += float(x_row[0][i]), mean[1] += float(x_row[1][i]);
    mean[0] /= given.k, mean[1] /= given.k;
#pragma unroll
    for (int i = 0; i < 128; i++) z[i] *= norm.scale[i / 2 % 2];
#pragma unroll 1
    for (int element = 0; element < 128; element++) {
        const int of_tile = element / 4 * 8 + first + element % 2;
        if (load_shared(columns + of_tile * 8) != ENDLESS.x || column + of_tile >= given.n) continue;
        const bool lower = element / 2 % 2;
        const float own_mean = lower ? mean[1] : mean[0], scale = lower ? norm.scale[1] : norm.scale[0];
        const T *const x = lower ? x_row[1] : x_row[0], *const w = given.w + (column + of_tile) * given.w_stride;
        float sum = given.bias == nullptr ? 0.0f : float(given.bias[column + of_tile]);
#pragma unroll 1
        for (int i = 0; i < given.k; i++) {
            sum = fmaf(normalised(x, given.gamma, given.beta, i, own_mean, scale), float(w[i]), sum);
        }
#pragma unroll
        for (int i = 0; i < 128; i++) {
            if (i == element) z[i] = sum;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) norm.mean[half] = norm.distance(half), norm.scale[half] = 1.0f;
}

// Of a tile's columns, by its block alone, beside a tile that fills the registers.
template <typename T>
__device__ __forceinline__ void find_columns(uint32_t base, int warp, const Operands<T>& given, int first) {
#pragma unroll 1
    for (int row = warp * OWN + threadIdx.x % 32 / 8; row < (warp + 1) * OWN; row += 4) {
        const uint2 sums = sum_columns<1>(given, first + row);
        if (threadIdx.x % 8 == 0) store_shared(base + COLUMNS + row * 8, sums);
    }
    publish_writes();
    sync_first<MMA_WARPS * 32>();
}

// Of a tile's columns, in place of a tile: as fast as the copy engine brings them, which a GEMM would not keep busy.
__device__ __forceinline__ int columns_of_block() {
    return int(blockIdx.x / CLUSTER * CLUSTER + cluster_rank()) * N;  // beyond n the copy engine finds zeros
}

// γ and β come in x's place.
template <typename T>
__device__ __forceinline__ void fetch_to_sum(Ring ring, const CUtensorMap& w, const Operands<T>& given) {
    constexpr int SHARE = N / CLUSTER;  // rows that are fetched at once
    const int column = columns_of_block();
    for (int step = 0; step < given.grid.steps; step++, ring.next()) {
        const int more = min(K, given.k - step * K) * 2;
        wait(ring.empty(), ring.parity ^ 1);
        expect(ring.full(), W_BYTES + (given.gamma != nullptr ? more : 0) + (given.beta != nullptr ? more : 0));
        for (int share = 0; share < N; share += SHARE) {
            fetch(ring.w() + share * K * 2, w, step * K, column + share, ring.full());
        }
        if (given.gamma != nullptr) fetch_bytes(ring.x(), given.gamma + step * K, more, ring.full());
        if (given.beta != nullptr) fetch_bytes(ring.x() + GAMMA_BYTES, given.beta + step * K, more, ring.full());
    }
}

template <typename T>
__device__ __forceinline__ void tell_columns(Ring ring, int warp, const Operands<T>& given) {
    const int lane = threadIdx.x % 32, own = lane % 8, first = warp * OWN + lane / 8, column = columns_of_block();
    ColumnSums sums[OWN / 4];
#pragma unroll 1
    for (int step = 0; step < given.grid.steps; step++, ring.next()) {
        wait(ring.full(), ring.parity);
        if (step * 8 + own < given.k / 8) {
            Eight gamma = {ONES, ONES, ONES, ONES}, beta = {};
            if (given.gamma != nullptr) gamma = load_shared_16<Eight>(ring.x() + own * 16);
            if (given.beta != nullptr) beta = load_shared_16<Eight>(ring.x() + GAMMA_BYTES + own * 16);
#pragma unroll
            for (int i = 0; i < OWN / 4; i++) {
                const int row = first + i * 4;
                sums[i].add(load_shared_16<Eight>(ring.w() + row * K * 2 + (own ^ row % 8) * 16), gamma, beta);
            }
        }
        arrive_as_warp_in_all<CLUSTER>(ring.empty(), lane);
    }
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) {
        const int row = column + first + i * 4;
        const uint2 all = sums[i].all(given, row);
        if (own == 0 && column < given.n) given.workspace->columns[row] = all;
    }
    sync_first<MMA_WARPS * 32>();
    wait(ring.base + ENROLLED, 0);  // by all: threads that were apart cost the main loop its uniform registers
    if (threadIdx.x == 0 && column < given.n) {
        release(&given.workspace->told[column / N], load_shared(ring.base + EPOCH));
    }
}

// --- fetching ------------------------------------------------------------------------------------------------------

// Of w, half for both blocks of the cluster: the other block fetches the other half. For a norm γ comes with each step.
template <typename T, Form FORM>
__device__ void fetch_all(uint32_t base, const CUtensorMap& x, const CUtensorMap& w, const Operands<T>& given) {
    constexpr int SHARE = N / CLUSTER;
    const int share = cluster_rank() * SHARE, steps = given.grid.steps;
    const bool to_sum = Tiles<FORM>::sums(given.grid);
    if (to_sum) fetch_to_sum(Ring(base), w, given);
    Ring ring(base, to_sum ? steps : 0);
    for (Tiles<FORM> tiles(given.grid); tiles.left(); tiles.next()) {
        const auto [row, column, sums] = tiles.tile();
        for (int step = 0; step < steps; step++, ring.next()) {
            const int more = FORM == NORM && given.gamma != nullptr ? min(K, given.k - step * K) * 2 : 0;
            wait(ring.empty(), ring.parity ^ 1);
            expect(ring.full(), STAGE + more);
            fetch(ring.x(), x, step * K, row, ring.full());
            fetch_for((1 << CLUSTER) - 1, ring.w() + share * K * 2, w, step * K, column + share, ring.full());
            if (more > 0) fetch_bytes(ring.gamma(), given.gamma + step * K, more, ring.full());
        }
    }
}

enum Kind : uint32_t { USUAL, UNTOLD, WITH_ENDLESS };

// What belongs to a tile's columns, from the workspace, by a warp.
template <typename T>
__device__ void fetch_columns(uint32_t base, const Operands<T>& given) {
    const int lane = threadIdx.x % 32;
    const bool first_lane = lane == 0;
    uint32_t parity = 0, epoch = 0;
    await_previous();  // also `sum_all_columns`; so launches enrol one after the other, whichever threads asked for them
    if (first_lane) {
        if (given.workspace != nullptr) epoch = given.workspace->enrol();
        store_shared(base + EPOCH, epoch);
        arrive(base + ENROLLED);
    }
    for (Tiles<NORM> tiles(given.grid); tiles.left(); tiles.next(), parity ^= 1) {
        const int column = tiles.tile().column;
        Kind kind = given.grid.summing == 0 ? USUAL : UNTOLD;
        if (first_lane) {
            for (int look = 0; look < given.max_polls && kind == UNTOLD; look++) {
                if (acquire(&given.workspace->told[column / N]) == epoch) kind = USUAL;
            }
            wait(base + COLUMNS_READ, parity ^ 1);  // those of the tile before
            if (kind == USUAL) {
                publish_writes_of_all();
                expect(base + COLUMNS_FULL, COLUMNS_BYTES);
                fetch_bytes(base + COLUMNS, given.columns + column, COLUMNS_BYTES, base + COLUMNS_FULL);
            } else {
                arrive(base + COLUMNS_FULL);
            }
        }
        kind = Kind(__shfl_sync(0xffffffff, kind, 0));
        wait(base + COLUMNS_FULL, parity);
        if (kind == USUAL && any_endless(base)) kind = WITH_ENDLESS;
        if (first_lane) store_shared(base + KIND, kind);
        arrive_as_warp(base + COLUMNS_KNOWN, lane);
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

// The same before GELU, rounded as a GEMM and GELU apart would: half as many registers as the tile had.
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

// After a norm a tile is finished at once, but only as much of it written as there are buffers for: a chunk more would wait
// until the copy engine has read one.
struct HalfHeld : Rows {
    static constexpr int HELD = PARTS / 2;
    uint32_t pairs[HELD][4];
    bool holds = false;

    using Rows::Rows;

    __device__ __forceinline__ void write_rest() {
        if (!holds) return;
        holds = false;
#pragma unroll
        for (int part = 0; part < HELD; part++) write(PARTS - HELD + part, pairs[part]);
    }
};

// One factor of `distance`·Σγw + Σβw + bias, a dot product of 8 terms whose other factor has both sums as `sum_columns`
// splits them: a row's distance, what rounding leaves of it, 1, and 0, each for two terms.
__device__ __forceinline__ uint32_t term(float distance) {
    const float high = __bfloat162float(__float2bfloat16_rn(distance));
    const int which = threadIdx.x % 4;
    return twice(which == 0 ? high : which == 1 ? distance - high : which == 2 ? 1.0f : 0.0f);
}

// The norm of a tile. What belongs to a column is two words; the lanes with 1 need the second.
template <typename T>
__device__ __forceinline__ void normalise(float (&z)[128], const Norm& norm, HalfHeld& rows, uint32_t columns) {
    const int lane = threadIdx.x % 32;
    const uint32_t own = columns + lane / 4 * 8 + (lane % 4 == 2) * 4;
    const uint32_t terms[2] = {term(-norm.distance(0)), term(-norm.distance(1))};
    uint32_t ahead[8];
#pragma unroll
    for (int j = 0; j < 8; j++) ahead[j] = load_shared(own + j * 64);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float* four = z + j * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] *= norm.scale[i / 2];
        multiply_few(four, terms, ahead[j % 8]);
        if (j + 8 < N / 8) ahead[j % 8] = load_shared(own + (j + 8) * 64);
        uint32_t(&pairs)[4] = rows.pairs[j / 2 % HalfHeld::HELD];
#pragma unroll
        for (int half = 0; half < 2; half++) pairs[j % 2 * 2 + half] = packed<T>(four[half * 2], four[half * 2 + 1]);
        if (j % 2 == 1 && j / 2 < PARTS - HalfHeld::HELD) rows.write(j / 2, pairs);
    }
    rows.holds = true;
}

// A step of x by registers. What is being multiplied is summed meanwhile, before the next is begun: else the compiler
// sums all of a step before its last wgmma, longer than those before run, and tensor cores idle. Not at a step's
// begin, which has waits of its own. So the last 16 columns, `centred`, are left to be summed.
//
// wgmma is issued two by two, with one fence for both: a step has K / 32 of such pairs, and one less may be on its way
// when the registers of its counterpart in the step before are written.
template <bool SUMMED>
__device__ __forceinline__ void multiply_step(
    float (&z)[128], Sums& sums, uint32_t (&centred)[4], const uint32_t (&means)[2], uint32_t x, uint64_t w,
    uint32_t gamma, bool add, uint32_t zero = 0) {
    static_assert(K % 32 == 0);
    uint32_t own[K / 16][4], by[K / 32][4];
    // Of matrices whose rows are all the same every lane gets what belongs to its columns.
#pragma unroll
    for (int i = 0; i < K / 32; i++) load_matrices(by[i], gamma + i * 64 + threadIdx.x % 32 / 8 * 16);
#pragma unroll
    for (int part = 0; part < K / 16; part++) {
        uint32_t found[4], settled = 0;
        load_matrices(found, x ^ part * 32);
        if constexpr (SUMMED) {
            sums.add(centred);
            if (part > 0) settled = sums.settled(zero);
        }
        if (part % 2 == 0) wgmma_wait<K / 32 - 1>();  // until the registers were read that are written now
#pragma unroll
        for (int i = 0; i < 4; i++) {
            centred[i] = minus(found[i], means[i % 2]);
            own[part][i] = times(centred[i], by[part / 2][part % 2 * 2 + i / 2], settled);
        }
        if (part % 2 == 0) continue;
        wgmma_fence();
        multiply(z, own[part - 1], w + 2 * (part - 1), add || part > 1);
        multiply(z, own[part], w + 2 * part, true);
        wgmma_commit();
    }
}

template <typename T, Form FORM>
__device__ __forceinline__ void multiply_all(uint32_t base, int warp, const CUtensorMap& y, const Operands<T>& given) {
    const int lane = threadIdx.x % 32, group = warp / 4;
    const int row = warp * 16;  // of the tile; the lane has two, `lane / 4` and 8 more further on
    std::conditional_t<FORM == NORM, HalfHeld, Held<T, FORM>> rows(y, base + OUT + warp * 2 * OUT_BYTES);
    const bool to_sum = Tiles<FORM>::sums(given.grid);
    if (to_sum) tell_columns(Ring(base), warp, given);
    Ring ring(base, to_sum ? given.grid.steps : 0);
    uint32_t parity = 0;  // of a tile's columns
    Tiles<FORM> tiles(given.grid);
    Tile tile = tiles.tile();
    uint32_t guess[2] = {};  // of the next tile's means
    const auto guess_next = [&] {
        // Where the copy engine fills up rows nothing may be subtracted: that would count.
        if (FORM != NORM || given.k % K != 0 || !tiles.left()) return;
        uint32_t first[4];
        wait(ring.full(), ring.parity);
        load_matrices(first, ring.x() + row * K * 2 + rows.eight);
        guess_means(guess, first);
    };
    guess_next();
    while (tiles.left()) {
        float z[128];
        Sums sums;
        Norm norm;
        uint32_t before = 0, means[2] = {guess[0], guess[1]}, centred[4] = {};
        const Bias<T> bias(given, tile.column);
        const int top = tile.row + row, left = tile.column;
        const bool sum = tile.sums;
        Told told;
        const auto advance = [&](int step) {
            wait(ring.full(), ring.parity);
            const uint64_t x = matrix(ring.x() + group * (X_BYTES / 2)), w = matrix(ring.w());
            if constexpr (FORM == NORM) {
                const uint32_t own = ring.x() + row * K * 2 + rows.eight;
                if (sum) {
                    const uint32_t zero = uint32_t(given.n) >> 31;
                    multiply_step<true>(z, sums, centred, means, own, w, ring.gamma(), step > 0, zero);
                } else {
                    if (step == given.grid.steps - 1 && given.max_polls > 0) told.look(*given.workspace, top + lane / 4);
                    multiply_step<false>(z, sums, centred, means, own, w, ring.gamma(), step > 0);
                }
            } else {
                wgmma_fence();
#pragma unroll
                for (int part = 0; part < K / 16; part++) multiply<T>(z, x + 2 * part, w + 2 * part, step + part > 0);
                wgmma_commit();
                if (rows.next < PARTS) rows.finish_next();
                wgmma_wait<1>();
            }
            if (step > 0) arrive_as_warp_in_all<CLUSTER>(before, lane);
            before = ring.empty();
            ring.next();
        };
        advance(0);
        if constexpr (FORM == NORM) rows.write_rest();  // beside the first wgmma
        for (int step = 1; step < given.grid.steps; step++) advance(step);
        tiles.next();
        tile = tiles.tile();
        tile.settle();
        bool lost = false, again = false;
        uint32_t kind = USUAL;
        if constexpr (FORM == NORM) {
            rows.row = top, rows.column = left;
            wait(base + ENROLLED, 0);
            const uint32_t epoch = load_shared(base + EPOCH);
            if (sum) {
                sums.add(centred);
                norm = sums.norm(given.share, given.eps);
                const bool others = given.grid.across > 1 && given.workspace != nullptr;  // tiles of the same rows
                if (others && lane % 4 == 0) norm.tell(*given.workspace, epoch, top + lane / 4);
            } else {
                lost = given.max_polls == 0 || !__all_sync(0xffffffff, told.found(norm, epoch, top + lane / 4));
            }
            again = __any_sync(0xffffffff, norm.far());
            if (again && !lost) norm.correct(means);  // a branch: the wait is not moved in front of all this
            guess_next();
            wait(base + COLUMNS_KNOWN, parity);
            parity ^= 1;
            kind = load_shared(base + KIND);
        }
        wgmma_wait<0>();
        refresh(z);
        arrive_as_warp_in_all<CLUSTER>(before, lane);
        if constexpr (FORM == NORM) {
            if (lost || again || kind != USUAL) {
                if (kind == UNTOLD) {
                    find_columns(base, warp, given, rows.column);
                    if (any_endless(base)) kind = WITH_ENDLESS;
                }
                if (lost) {
                    if (given.grid.apart) {
                        norm = await_rows(base, given, rows.row);
                    } else {
                        norm = sum_from_memory(means[0], means[1], given, rows.row + lane / 4);
                    }
                    again = __any_sync(0xffffffff, norm.far());
                    if (again) norm.correct(means);
                }
                if (again) redo(z, norm, means, given, rows.row + lane / 4, rows.column);
                if (kind == WITH_ENDLESS) {
                    make_endless<T>(z, norm, base + COLUMNS, given, rows.row + lane / 4, rows.column);
                }
            }
            normalise<T>(z, norm, rows, base + COLUMNS);
            arrive_as_warp(base + COLUMNS_READ, lane);
        } else {
            while (rows.next < PARTS) rows.finish_next();  // there were fewer steps
            rows.take(z, bias);
            rows.row = top, rows.column = left;
        }
    }
    // Of the last tile, without anything beside it.
    if constexpr (FORM == NORM) {
        rows.write_rest();
    } else {
        rows.finish_all();
    }
    if (lane == 0) await_puts<0>();
}

template <typename T, Form FORM>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(BLOCK, 1) persistent_matmul(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap y,
    const __grid_constant__ Operands<T> given) {
    extern __shared__ __align__(1024) uint8_t memory[];  // as swizzled rows want it
    const uint32_t base = address(memory);
    if (threadIdx.x == 0) {
        prefetch(x), prefetch(w), prefetch(y);
        for (int stage = 0; stage < STAGES; stage++) {
            make_barrier(base + FULL + stage * 8, 1);
            // w is fetched for both blocks, by whichever finds it done with in both.
            make_barrier(base + EMPTY + stage * 8, CLUSTER * MMA_WARPS * ARRIVALS);
        }
        make_barrier(base + COLUMNS_READ, MMA_WARPS * ARRIVALS);
        make_barrier(base + COLUMNS_FULL, 1);
        make_barrier(base + COLUMNS_KNOWN, ARRIVALS);
        make_barrier(base + ENROLLED, 1);
        publish_barriers();
    }
    if (FORM == NORM && threadIdx.x < MMA_WARPS) {
        store_shared(base + MAX_POLLS + threadIdx.x * 4, uint32_t(given.max_polls));
    }
    if (FORM == NORM && threadIdx.x < STAGES * GAMMA_BYTES / 4) {  // for no γ, and beyond its end
        reinterpret_cast<uint32_t*>(memory + GAMMA)[threadIdx.x] = ONES;
        publish_writes();
    }
    cluster_sync();
    let_next_begin();
    // `sum_all_columns` lets it begin when all before has ended: x and w are there.
    if (FORM != NORM || given.grid.summing > 0) await_previous();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp >= MMA_WARPS) {
        give_registers<40>();  // of 168 each: 128·40 + 256·232 = 384·168
        const bool first_lane = threadIdx.x % 32 == 0;
        if (warp == MMA_WARPS && first_lane) fetch_all<T, FORM>(base, x, w, given);
        if constexpr (FORM == NORM) {
            if (warp == MMA_WARPS + 1) fetch_columns(base, given);
            const int stats_warp = warp - (MMA_WARPS + 2);
            if (stats_warp >= 0 && given.grid.apart && given.workspace != nullptr) tell_rows(base, stats_warp, given);
        }
    } else {
        take_registers<232>();
        multiply_all<T, FORM>(base, warp, y, given);
    }
    cluster_sync();  // until all writes into the other block are done
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

namespace {

int pieces(int64_t size, int piece) { return int((size + piece - 1) / piece); }

template <typename T, Form FORM>
int launch(const Operands<T>& given, void* y, int blocks, cudaStream_t stream) {
    constexpr bool HALF = std::is_same_v<T, __half>;
    CUtensorMap maps[3];
    if (int status = describe(maps[0], HALF, given.x, given.m, given.k, given.x_stride, M)) return status;
    if (int status = describe(maps[1], HALF, given.w, given.n, given.k, given.w_stride, N / CLUSTER)) return status;
    if (int status = describe(maps[2], HALF, y, given.m, given.n, given.n, 16)) return status;
    cudaFuncSetAttribute(persistent_matmul<T, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    return launch_with_pdl(persistent_matmul<T, FORM>, blocks, BLOCK, SHARED, stream, maps[0], maps[1], maps[2], given);
}

// At once, on this device.
int possible_clusters() {
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return std::min(multiprocessors / CLUSTER, int(StreamWorkspace::SEATS) / CLUSTER);
}

Grid grid_of(int64_t m, int64_t n, int64_t k) { return {pieces(m, M * CLUSTER), pieces(n, N), pieces(k, K), 0, false}; }

}  // namespace

// columns:   to work in, 8 bytes for each row of w that whole tiles have: beyond n it does not matter what they are
// beside:    1: some blocks sum columns beside tiles, 0: a kernel before does, -1: whichever is likely quicker
// apart:     1: warps that multiply nothing sum rows, 0: tiles do, -1: whichever is likely quicker
// max_polls:  polls of the workspace, 0.4 µs each, before a block computes the sum itself
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* columns, void* y, int64_t m,
    int64_t n, int64_t k, int64_t x_stride, int64_t w_stride, double eps, int64_t beside, int64_t apart, int64_t max_polls,
    cudaStream_t stream) {
    using T = __nv_bfloat16;
    Operands<T> given = {
        (const T*)x, (const T*)w, (const T*)bias, (const T*)gamma, (const T*)beta, (const uint2*)columns,
        nullptr, x_stride, w_stride, int(m), int(n), int(k), 1.0f / k, float(eps), int(max_polls), grid_of(m, n, k)};
    // Never destroyed: a graph may be, after the program's end.
    static auto& workspaces = *new StreamWorkspaces<StreamWorkspace>;
    given.workspace = workspaces.of(stream);
    if (given.workspace == nullptr) given.max_polls = 0;
    // By the shape alone, as the order of sums is another. Stats warps do not wait until others have polled.
    given.grid.apart = m <= StreamWorkspace::ROWS && (apart == 1 || (apart < 0 && given.grid.across >= MANY_TILES));
    const int tiles = given.grid.down * given.grid.across, summing = pieces(given.grid.across, CLUSTER);
    const int clusters = possible_clusters();
    const bool fits =
        given.workspace != nullptr && summing <= clusters && given.grid.across * N <= StreamWorkspace::COLUMNS;
    const bool free = pieces(tiles + summing, clusters) == pieces(tiles, clusters);  // no round more
    if (fits && (beside == 1 || (beside < 0 && free))) {
        given.grid.summing = summing;
        given.columns = given.workspace->columns;
    } else {
        // As much shared memory as the GEMM has: else multiprocessors stop to share theirs out anew.
        cudaFuncSetAttribute(
            sum_all_columns<T>, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        const int blocks = pieces(n, FEW / 8);
        if (int status = launch_with_pdl(sum_all_columns<T>, blocks, FEW, 0, stream, given, (uint2*)columns)) return status;
    }
    return launch<T, NORM>(given, y, std::min(tiles + int(given.grid.summing), clusters) * CLUSTER, stream);
}

extern "C" int linear_gelu(
    const void* x, const void* w, const void* bias, void* y, int64_t m, int64_t n, int64_t k, int64_t x_stride,
    int64_t w_stride, int64_t tanh, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)x, (const T*)w, (const T*)bias, nullptr, nullptr, nullptr, nullptr, x_stride, w_stride,
            int(m), int(n), int(k), 0.0f, 0.0f, 0, grid_of(m, n, k)};
        const int blocks = std::min(given.grid.down * given.grid.across, possible_clusters()) * CLUSTER;
        return tanh ? launch<T, TANH>(given, y, blocks, stream) : launch<T, ERF>(given, y, blocks, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

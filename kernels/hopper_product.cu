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
// memory, which fetching and multiplying keep busy all the time, is read no more for it. With μ and r the mean and
// 1/deviation of a row, and c near μ:
//
//     y = r·((x − c)⊙γ)·wᵀ − r·(μ − c)·Σγw + (Σβw + bias)
//
// Both sums over a row of w, its column of y, come from a small kernel before, which a tile awaits with its last step.
//
// μ and r are summed once and told to the tiles of the same rows: of each panel of rows those of the first columns come
// first. They sum, and so do tiles that are made in the same round; all others look at their end, a tile's time later,
// and should a row not be there, sum it from memory. None ever waits for another block, which may not have begun: two
// products side by side, each with blocks that wait for others of theirs, could wait for ever. What a tile finds are the
// bits that it would have summed itself, so that y does not depend on who was first.
#include <algorithm>

#include "hopper.cuh"

namespace optexp::hopper {

enum Form { NORM, TANH, ERF };

constexpr int M = 128, N = 256, K = 64;  // of a tile and a step: 128 bytes of a row, as wide as a swizzle
constexpr int STAGES = 4;                // steps in shared memory
constexpr int CLUSTER = 2, GROUP = 8;    // blocks that share w, and clusters one above the other that share L2
constexpr int PANEL = 32;                // clusters one above the other, whose rows are summed first
constexpr int BLOCK = 384;
constexpr int MULTIPLIERS = 8;  // warps
constexpr int CHUNK = 64;       // columns that are written at once
constexpr int PARTS = N / 16;   // of a tile, in which it is finished

constexpr int X_BYTES = M * K * 2, W_BYTES = N * K * 2, STAGE = X_BYTES + W_BYTES;
constexpr int OUT = STAGES * STAGE, OUT_BYTES = 16 * CHUNK * 2;  // two for each warp
constexpr int GAMMA = OUT + 2 * MULTIPLIERS * OUT_BYTES, GAMMA_BYTES = K * 2;
constexpr int COLUMNS = GAMMA + STAGES * GAMMA_BYTES, COLUMNS_BYTES = N * 8;
constexpr int FULL = COLUMNS + COLUMNS_BYTES, EMPTY = FULL + STAGES * 8, COLUMNS_READ = EMPTY + STAGES * 8;
constexpr int SHARED = COLUMNS_READ + 8;
static_assert(SHARED <= 227 * 1024);

constexpr uint32_t ONES = 0x3f803f80;     // two of bfloat16
constexpr uint32_t UNKNOWN = 0xbf800000;  // -1, in 1/deviation's place
constexpr float FAR = 2.0f;               // deviations between a row's mean and what was taken for it

// --- which tile, and which stage -----------------------------------------------------------------------------------

struct Grid {
    int down, across, steps;  // clusters one above the other, and side by side
};

template <typename T>
struct Operands {
    const T *x, *w, *bias, *gamma;  // null where there is none
    const uint2* columns;           // of each row of w, as `sum_columns` has them
    uint2* rows;                    // of each row of x, as a `Norm` has them; null where it has one tile
    int64_t x_stride, w_stride;
    int m, n, k;
    float share, eps;  // 1/k
    Grid grid;
};

struct Tile {
    int row, column;
    int sums;  // its rows, as nobody has told of them before: 0 or 1

    // Now, and not only when it is wanted.
    __device__ __forceinline__ void settle() { asm volatile("" : "+r"(row), "+r"(column), "+r"(sums)); }
};

// The tiles of a block, of which those of a cluster are one above the other: by groups of rows, in these by columns. For
// a norm rows are in panels, where tiles of the first columns come before all others: all rows at once would have all of
// x read in the first round, as fast as memory is.
template <Form FORM>
struct Tiles {
    static constexpr int FIRST = FORM == NORM;  // columns
    const Grid& grid;
    int cluster = blockIdx.x / CLUSTER;

    __device__ explicit Tiles(const Grid& grid) : grid(grid) {}
    __device__ bool left() const { return cluster < grid.down * grid.across; }
    __device__ void next() { cluster += gridDim.x / CLUSTER; }

    // Divisions take long: best beside products.
    __device__ Tile tile() const {
        const int top = FORM == NORM ? cluster / (PANEL * grid.across) * PANEL : 0, before = top * grid.across;
        const int tall = FORM == NORM ? min(grid.down - top, PANEL) : grid.down;
        const int round = cluster - int(blockIdx.x / CLUSTER);  // its first
        int down = cluster - before, across = 0;
        bool sums = FORM == NORM;
        if (FORM != NORM || down >= tall) {
            const int of_others = down - tall * FIRST, columns = grid.across - FIRST;
            const int first = of_others / (GROUP * columns) * GROUP, of_group = of_others - first * columns;
            const int height = min(tall - first, GROUP);
            across = of_group / height;
            down = first + of_group - across * height;
            across += FIRST;
            sums = FORM == NORM && before + down >= round;
        }
        return {((top + down) * CLUSTER + int(cluster_rank())) * M, across * N, sums};
    }
};

struct Ring {
    uint32_t base;
    int stage = 0;
    uint32_t parity = 0;

    __device__ explicit Ring(uint32_t base) : base(base) {}
    __device__ uint32_t x() const { return base + stage * STAGE; }
    __device__ uint32_t w() const { return x() + X_BYTES; }
    __device__ uint32_t gamma() const { return base + GAMMA + stage * GAMMA_BYTES; }
    __device__ uint32_t full() const { return base + FULL + stage * 8; }
    __device__ uint32_t empty() const { return base + EMPTY + stage * 8; }
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// --- fetching ------------------------------------------------------------------------------------------------------

// Of w, half for both blocks of the cluster: the other block fetches the other half. For a norm γ comes with each step,
// and what belongs to the tile's columns with its last: only there it is waited for.
template <typename T, Form FORM>
__device__ void fetch_all(uint32_t base, const CUtensorMap& x, const CUtensorMap& w, const Operands<T>& given) {
    constexpr int SHARE = N / CLUSTER;
    const int share = cluster_rank() * SHARE, steps = given.grid.steps;
    uint32_t parity = 1;
    Ring ring(base);
    for (Tiles<FORM> tiles(given.grid); tiles.left(); tiles.next()) {
        const auto [row, column, sums] = tiles.tile();
        for (int step = 0; step < steps; step++, ring.next()) {
            const bool last = FORM == NORM && step == steps - 1;
            const int more = FORM == NORM && given.gamma != nullptr ? min(K, given.k - step * K) * 2 : 0;
            wait(ring.empty(), ring.parity ^ 1);
            expect(ring.full(), STAGE + more + (last ? COLUMNS_BYTES : 0));
            fetch(ring.x(), x, step * K, row, ring.full());
            fetch_for((1 << CLUSTER) - 1, ring.w() + share * K * 2, w, step * K, column + share, ring.full());
            if (more > 0) fetch_bytes(ring.gamma(), given.gamma + step * K, more, ring.full());
            if (last) {
                await_previous();
                wait(base + COLUMNS_READ, parity);  // those of the tile before
                fetch_bytes(base + COLUMNS, given.columns + column, COLUMNS_BYTES, ring.full());
                parity ^= 1;
            }
        }
    }
}

// --- pairs of 16 bits ----------------------------------------------------------------------------------------------

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

// Of the two rows of which a lane has elements, as a product's operand has them, even registers and odd ones: how far
// the mean is from what was taken for it, and 1/deviation. In memory both are one word: nothing has to be ordered.
struct Norm {
    float mean[2], scale[2];

    __device__ __forceinline__ float distance(int half) const { return mean[half] * scale[half]; }  // in deviations

    __device__ __forceinline__ bool far() const { return fmaxf(fabsf(distance(0)), fabsf(distance(1))) > FAR; }

    // What was taken for the means, by what they are.
    __device__ __forceinline__ void correct(uint32_t (&means)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) means[half] = twice(unpacked<__nv_bfloat16>(means[half]).x + mean[half]);
    }

    // From the first of the lane's rows on.
    __device__ __forceinline__ void tell(uint2* rows) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            post(rows + half * 8, {__float_as_uint(mean[half]), __float_as_uint(scale[half])});
        }
    }

    __device__ __forceinline__ void look(const uint2* rows) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 found = peek(rows + half * 8);
            mean[half] = __uint_as_float(found.x), scale[half] = __uint_as_float(found.y);
        }
    }

    __device__ __forceinline__ bool found() const {
        return __float_as_uint(scale[0]) != UNKNOWN && __float_as_uint(scale[1]) != UNKNOWN;
    }
};

// Of the same rows.
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

    // 0, for what has to come after the sums: the compiler does not know that `zero` is none other.
    __device__ __forceinline__ uint32_t settled(uint32_t zero) const {
        uint32_t all = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) all |= __float_as_uint(sum[half]) | __float_as_uint(square[half]);
        return all & zero;
    }

    // Squares that overflow leave a scale of 0, as F.layer_norm does: fmaf does not overflow before it subtracts.
    __device__ __forceinline__ Norm norm(float share, float eps) const {
        Norm norm;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float mean = __fmul_rn(over_row(sum[half]), share);  // rounded, as it is told
            const float variance = fmaf(-mean, mean, over_row(square[half]) * share);
            norm.mean[half] = mean;
            norm.scale[half] = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);  // NaN stays
        }
        return norm;
    }

    // Over the four lanes that have a row between them.
    static __device__ float over_row(float value) {
        value += __shfl_xor_sync(0xffffffff, value, 1);
        return value + __shfl_xor_sync(0xffffffff, value, 2);
    }
};

// What a row's mean may be, from its first 16 columns: of four lanes' means the nearest to 0, or 0 between them. So a
// mean that is small beside the deviation is left alone, and x exact; and one channel far from all others is no mean.
__device__ __forceinline__ void guess_means(uint32_t (&means)[2], const uint32_t (&x)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 one = unpacked<__nv_bfloat16>(x[half]), two = unpacked<__nv_bfloat16>(x[half + 2]);
        float lowest = (one.x + one.y + two.x + two.y) * 0.25f, highest = lowest;
        for (int step = 1; step <= 2; step *= 2) {
            lowest = fminf(lowest, __shfl_xor_sync(0xffffffff, lowest, step));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
        }
        means[half] = twice(fmaxf(lowest, fminf(highest, 0.0f)));
    }
}

// A warp's 16 rows, in the order in which they are summed beside products, to the bit.
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

// A warp's 16 rows once more, from memory and with their true means: far from these, rounding x − c costs too much. Of
// 32 columns a lane takes eight in a row, of all operands: in which order they are multiplied does not matter.
template <typename T>
__device__ __forceinline__ void redo(
    float (&z)[128], Norm& norm, const uint32_t (&means)[2], const Operands<T>& given, int row, int column) {
    using Eight = Pack<uint32_t, 4>;
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

// One factor of `distance`·Σγw + Σβw + bias, a product of 8 terms whose other factor has both sums as `sum_columns`
// splits them: a row's distance, what rounding leaves of it, 1, and 0, each for two terms.
__device__ __forceinline__ uint32_t term(float distance) {
    const float high = __bfloat162float(__float2bfloat16_rn(distance));
    const int which = threadIdx.x % 4;
    return twice(which == 0 ? high : which == 1 ? distance - high : which == 2 ? 1.0f : 0.0f);
}

// The norm of a tile. What belongs to a column is two words; the lanes with 1 need the second.
template <typename T>
__device__ __forceinline__ void normalise(float (&z)[128], const Norm& norm, const Rows& rows, uint32_t columns) {
    const int lane = threadIdx.x % 32;
    const uint32_t own = columns + lane / 4 * 8 + (lane % 4 == 2) * 4;
    const uint32_t terms[2] = {term(-norm.distance(0)), term(-norm.distance(1))};
    uint32_t ahead[8], pairs[4];
#pragma unroll
    for (int j = 0; j < 8; j++) ahead[j] = load_shared(own + j * 64);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        float* four = z + j * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] *= norm.scale[i / 2];
        multiply_few(four, terms, ahead[j % 8]);
        if (j + 8 < N / 8) ahead[j % 8] = load_shared(own + (j + 8) * 64);
#pragma unroll
        for (int half = 0; half < 2; half++) pairs[j % 2 * 2 + half] = packed<T>(four[half * 2], four[half * 2 + 1]);
        if (j % 2 == 1) rows.write(j / 2, pairs);
    }
}

// A step of x by registers. What is being multiplied is summed meanwhile, before the next is begun: else the compiler
// sums all of a step before its last products, longer than those before run, and tensor cores idle. Not at a step's
// begin, which has waits of its own. So the last 16 columns, `centred`, are left to be summed.
template <bool SUMMED>
__device__ __forceinline__ void multiply_step(
    float (&z)[128], Sums& sums, uint32_t (&centred)[4], const uint32_t (&means)[2], uint32_t x, uint64_t w,
    uint32_t gamma, bool add, uint32_t zero = 0) {
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
        await_products<K / 16 - 1>();  // until the registers were read that are written now
#pragma unroll
        for (int i = 0; i < 4; i++) {
            centred[i] = minus(found[i], means[i % 2]);
            own[part][i] = times(centred[i], by[part / 2][part % 2 * 2 + i / 2], settled);
        }
        begin_products();
        multiply(z, own[part], w + 2 * part, add || part > 0);
        end_products();
    }
}

template <typename T, Form FORM>
__device__ __forceinline__ void multiply_all(uint32_t base, int warp, const CUtensorMap& y, const Operands<T>& given) {
    const int lane = threadIdx.x % 32, group = warp / 4;
    const int row = warp * 16;  // of the tile; the lane has two, `lane / 4` and 8 more further on
    std::conditional_t<FORM == NORM, Rows, Held<T, FORM>> rows(y, base + OUT + warp * 2 * OUT_BYTES);
    Ring ring(base);
    Tiles<FORM> tiles(given.grid);
    Tile tile = tiles.tile();
    while (tiles.left()) {
        float z[128];
        Sums sums;
        Norm norm;
        uint32_t before = 0, means[2] = {}, centred[4] = {};
        const Bias<T> bias(given, tile.column);
        uint2* const told = given.rows + tile.row + row + lane / 4;
        const int top = tile.row + row, left = tile.column;
        const bool sum = tile.sums;
        // Where the copy engine fills up rows nothing may be subtracted: that would count.
        if (FORM == NORM && given.k % K == 0) {
            uint32_t first[4];
            wait(ring.full(), ring.parity);
            load_matrices(first, ring.x() + row * K * 2 + rows.eight);
            guess_means(means, first);
        }
        for (int step = 0; step < given.grid.steps; step++) {
            wait(ring.full(), ring.parity);
            const uint64_t x = matrix(ring.x() + group * (X_BYTES / 2)), w = matrix(ring.w());
            if constexpr (FORM == NORM) {
                const uint32_t own = ring.x() + row * K * 2 + rows.eight;
                if (sum) {
                    const uint32_t zero = uint32_t(given.n) >> 31;
                    multiply_step<true>(z, sums, centred, means, own, w, ring.gamma(), step > 0, zero);
                } else {
                    if (step == given.grid.steps - 1) norm.look(told);
                    multiply_step<false>(z, sums, centred, means, own, w, ring.gamma(), step > 0);
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
        tiles.next();
        tile = tiles.tile();
        tile.settle();
        bool lost = false, again = false;
        if constexpr (FORM == NORM) {
            rows.row = top, rows.column = left;
            if (sum) {
                sums.add(centred);
                norm = sums.norm(given.share, given.eps);
                if (given.rows != nullptr) {
                    await_previous();  // `sum_columns`, which takes back what was told before
                    if (lane % 4 == 0) norm.tell(told);
                }
            } else {
                lost = !__all_sync(0xffffffff, norm.found());
            }
            again = __any_sync(0xffffffff, norm.far());
            if (again && !lost) norm.correct(means);  // a branch: the wait is not moved in front of all this
        }
        await_products<0>();
        refresh(z);
        if (lane < CLUSTER) arrive_at(before, lane);
        if constexpr (FORM == NORM) {
            if (lost) {
                norm = sum_from_memory(means[0], means[1], given, rows.row + lane / 4);
                again = __any_sync(0xffffffff, norm.far());
                if (again) norm.correct(means);
            }
            if (again) redo(z, norm, means, given, rows.row + lane / 4, rows.column);
            normalise<T>(z, norm, rows, base + COLUMNS);
            if (lane == 0) arrive(base + COLUMNS_READ);  // the whole warp has: it has multiplied by them
        } else {
            while (rows.next < PARTS) rows.finish_next();  // there were fewer steps
            rows.take(z, bias);
            rows.row = top, rows.column = left;
        }
    }
    if constexpr (FORM != NORM) rows.finish_all();  // of the last tile, without anything beside it
    if (lane == 0) await_puts<0>();
}

template <typename T, Form FORM>
__global__ void __cluster_dims__(CLUSTER) __launch_bounds__(BLOCK, 1) product(
    const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap y,
    const __grid_constant__ Operands<T> given) {
    extern __shared__ __align__(1024) uint8_t memory[];  // as swizzled rows want it
    const uint32_t base = address(memory);
    if (threadIdx.x == 0) {
        prefetch(x), prefetch(w), prefetch(y);
        for (int stage = 0; stage < STAGES; stage++) {
            make_barrier(base + FULL + stage * 8, 1);
            // w is fetched for both blocks, by whichever finds it done with in both.
            make_barrier(base + EMPTY + stage * 8, CLUSTER * MULTIPLIERS);
        }
        make_barrier(base + COLUMNS_READ, MULTIPLIERS);
        publish_barriers();
    }
    if (FORM == NORM && threadIdx.x < STAGES * GAMMA_BYTES / 4) {  // for no γ, and beyond its end
        reinterpret_cast<uint32_t*>(memory + GAMMA)[threadIdx.x] = ONES;
        publish_writes();
    }
    cluster_sync();
    let_next_begin();
    // For a norm the kernel before is `sum_columns`, which lets it begin when all before has ended: x and w are there.
    if constexpr (FORM != NORM) await_previous();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp >= MULTIPLIERS) {
        give_registers<24>();  // of 168 each: 128·24 + 256·240 = 384·168
        if (warp == MULTIPLIERS && threadIdx.x % 32 == 0) fetch_all<T, FORM>(base, x, w, given);
    } else {
        take_registers<240>();
        multiply_all<T, FORM>(base, warp, y, given);
    }
    cluster_sync();  // until nobody writes into the other block any more
}

// --- what a norm needs of each row of w ----------------------------------------------------------------------------

// Rounded, and what that leaves.
__device__ uint32_t split(float value) {
    const float high = __bfloat162float(__float2bfloat16_rn(value));
    return packed<__nv_bfloat16>(high, isfinite(high) ? value - high : 0.0f);
}

// Σγw, and Σβw + bias, of a row a warp; and of `told` rows of x nothing is known yet. The product may begin on
// multiprocessors that are done with their rows.
__global__ void __launch_bounds__(THREADS, 4) sum_columns(
    const __nv_bfloat16* w, const __nv_bfloat16* gamma, const __nv_bfloat16* beta, const __nv_bfloat16* bias,
    uint2* columns, uint2* rows, int told, int n, int k, int64_t w_stride) {
    using Eight = Pack<uint32_t, 4>;
    constexpr int PACKS = 4;  // that are read before one is used
    await_previous();
    let_next_begin();  // only now: the product reads x and w at once
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < told; i += gridDim.x * THREADS) rows[i] = {0, UNKNOWN};
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n) return;
    const auto* from = reinterpret_cast<const Eight*>(w + row * w_stride);
    const auto *factors = reinterpret_cast<const Eight*>(gamma), *summands = reinterpret_cast<const Eight*>(beta);
    float factor = 0.0f, offset = 0.0f;
    for (int first = lane; first < k / 8; first += 32 * PACKS) {
        Eight values[PACKS], by[PACKS], with[PACKS];
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            const int pack = first + i * 32;
            const bool there = pack < k / 8;
            values[i] = there ? from[pack] : Eight{};
            by[i] = factors == nullptr || !there ? Eight{ONES, ONES, ONES, ONES} : factors[pack];
            with[i] = summands == nullptr || !there ? Eight{} : summands[pack];
        }
#pragma unroll
        for (int i = 0; i < PACKS * 4; i++) {
            using T = __nv_bfloat16;
            const float2 v = unpacked<T>(values[i / 4].values[i % 4]);
            const float2 f = unpacked<T>(by[i / 4].values[i % 4]), o = unpacked<T>(with[i / 4].values[i % 4]);
            factor = fmaf(v.x, f.x, fmaf(v.y, f.y, factor));
            offset = fmaf(v.x, o.x, fmaf(v.y, o.y, offset));
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        factor += __shfl_xor_sync(0xffffffff, factor, step);
        offset += __shfl_xor_sync(0xffffffff, offset, step);
    }
    if (lane == 0) columns[row] = {split(factor), split(offset + (bias == nullptr ? 0.0f : float(bias[row])))};
}

}  // namespace optexp::hopper

using namespace optexp;
using namespace optexp::hopper;

namespace {

int pieces(int64_t size, int piece) { return int((size + piece - 1) / piece); }

template <typename T, Form FORM>
int launch(Operands<T> given, void* y, cudaStream_t stream) {
    constexpr bool HALF = std::is_same_v<T, __half>;
    given.grid = {pieces(given.m, M * CLUSTER), pieces(given.n, N), pieces(given.k, K)};
    CUtensorMap maps[3];
    if (int status = describe(maps[0], HALF, given.x, given.m, given.k, given.x_stride, M)) return status;
    if (int status = describe(maps[1], HALF, given.w, given.n, given.k, given.w_stride, N / CLUSTER)) return status;
    if (int status = describe(maps[2], HALF, y, given.m, given.n, given.n, 16)) return status;
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int blocks = std::min(given.grid.down * given.grid.across, multiprocessors / CLUSTER) * CLUSTER;
    cudaFuncSetAttribute(product<T, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    return launch_early(product<T, FORM>, blocks, BLOCK, SHARED, stream, maps[0], maps[1], maps[2], given);
}

}  // namespace

// `columns` and `rows` are to work in, 8 bytes for each row of w, and of x, that whole tiles have (of x, two of them):
// beyond n and m it does not matter what they are.
extern "C" int layernorm_linear(
    const void* x, const void* gamma, const void* beta, const void* w, const void* bias, void* columns, void* rows,
    void* y, int64_t m, int64_t n, int64_t k, int64_t x_stride, int64_t w_stride, double eps, cudaStream_t stream) {
    using T = __nv_bfloat16;
    const bool alone = n <= N;  // no other tile of the same rows
    const int told = alone ? 0 : pieces(m, M * CLUSTER) * M * CLUSTER;
    const Operands<T> given = {
        (const T*)x, (const T*)w, nullptr, (const T*)gamma, (const uint2*)columns, alone ? nullptr : (uint2*)rows,
        x_stride, w_stride, int(m), int(n), int(k), 1.0f / k, float(eps)};
    // As much shared memory as the product has: else multiprocessors stop to share theirs out anew.
    cudaFuncSetAttribute(sum_columns, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (int status = launch_early(
            sum_columns, pieces(n, THREADS / 32), THREADS, 0, stream, given.w, given.gamma, (const T*)beta,
            (const T*)bias, (uint2*)columns, given.rows, told, given.n, given.k, w_stride)) {
        return status;
    }
    return launch<T, NORM>(given, y, stream);
}

extern "C" int linear_gelu(
    const void* x, const void* w, const void* bias, void* y, int64_t m, int64_t n, int64_t k, int64_t x_stride,
    int64_t w_stride, int64_t tanh, int64_t type, cudaStream_t stream) {
    const auto of = [&](auto zero) {
        using T = decltype(zero);
        const Operands<T> given = {
            (const T*)x, (const T*)w, (const T*)bias, nullptr, nullptr, nullptr, x_stride, w_stride,
            int(m), int(n), int(k), 0.0f, 0.0f};
        return tanh ? launch<T, TANH>(given, y, stream) : launch<T, ERF>(given, y, stream);
    };
    return type == 2 ? of(__nv_bfloat16()) : type == 1 ? of(__half()) : int(cudaErrorInvalidValue);
}

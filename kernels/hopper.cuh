// What a GEMM on Hopper (sm_90a) is made of: barriers that count arrivals and bytes, the copy engine, and wgmma.
#pragma once

#include <cuda.h>

#include "vector.cuh"

namespace optexp::hopper {

__device__ inline uint32_t address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// --- barriers ----------------------------------------------------------------------------------------------------
// A phase ends when all have arrived and all announced bytes are there. Who waits says by `parity` for which phase, 0
// for the first; that of the phase before the first has ended.

__device__ inline void make_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers of this block known to the cluster and to the copy engine; a cluster_sync must follow.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ inline void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the barrier of a block of the cluster that lies where `barrier` does here. No ordinary access is ordered by it: that
// would cost a fence over the whole GPU.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A warp arrives when all of its lanes have come this far. One does so for all, whom a fence lets know what the others have
// read and written. compute-sanitizer's racecheck does not see that: in what is built for it each lane arrives on its own.
#ifdef OPTEXP_FOR_RACECHECK
constexpr int ARRIVALS = 32;
#else
constexpr int ARRIVALS = 1;
#endif

__device__ inline void arrive_as_warp(uint32_t barrier, int lane) {
    __syncwarp();
    if (lane < ARRIVALS) arrive(barrier);
}

// In each block of the cluster.
template <int BLOCKS>
__device__ __forceinline__ void arrive_as_warp_in_all(uint32_t barrier, int lane) {
    __syncwarp();
    for (; lane < BLOCKS * ARRIVALS; lane += 32) arrive_at(barrier, lane % BLOCKS);
}

__device__ inline void expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Of the first so many threads of the block, by a barrier that is not that of the whole block.
template <int THREADS>
__device__ void sync_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// --- words that other blocks read and write meanwhile ------------------------------------------------------------
// Of 16 bytes, each is read and written as a whole, and orders nothing else.

template <typename Word>
__device__ inline void post(Word* to, const Word& word) {
    static_assert(sizeof(Word) == 16);
    const auto& halves = reinterpret_cast<const uint64_t(&)[2]>(word);
    asm volatile(
        "{\n.reg .b128 word;\nmov.b128 word, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
        "l"(halves[0]), "l"(halves[1])
        : "memory");
}

template <typename Word>
__device__ inline Word peek(const Word* from) {
    static_assert(sizeof(Word) == 16);
    uint64_t halves[2];
    asm volatile(
        "{\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%2];\nmov.b128 {%0, %1}, word;\n}"
        : "=l"(halves[0]), "=l"(halves[1])
        : "l"(from)
        : "memory");
    return reinterpret_cast<const Word&>(halves);
}

// What this thread knows to be written, before the word.
__device__ inline void release(uint32_t* to, uint32_t word) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ inline uint32_t acquire(const uint32_t* from) {
    uint32_t word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// What it was before so many were added.
__device__ inline uint64_t take(uint64_t* from, uint64_t count) {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(from), "l"(count) : "memory");
    return before;
}

// --- pairs of 16 bits ----------------------------------------------------------------------------------------------

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

// --- a norm --------------------------------------------------------------------------------------------------------

// An element of a row as a norm of its own leaves it, rounded. γ, β: null where there is none.
template <typename T>
__device__ inline float normalised(const T* x, const T* gamma, const T* beta, int i, float mean, float scale) {
    const float scaled = (float(x[i]) - mean) * scale * (gamma == nullptr ? 1.0f : float(gamma[i]));
    return float(T(scaled + (beta == nullptr ? 0.0f : float(beta[i]))));
}

// --- registers, which the warpgroups of a block share out anew ---------------------------------------------------

template <int COUNT>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- the copy engine ---------------------------------------------------------------------------------------------

__device__ inline void prefetch(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ inline void fetch(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// Bytes in a row: multiples of 16, as both addresses are.
__device__ inline void fetch_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}

// To the same place of all blocks of the cluster whose bit is set, whose own barriers learn of it.
__device__ inline void fetch_for(
    uint16_t blocks, uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
        "l"(&map), "r"(barrier), "h"(blocks), "r"(column), "r"(row)
        : "memory");
}

// Ordinary writes of this thread, for the copy engine to see; a barrier must follow.
__device__ inline void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Ordinary writes to global memory that this thread has learnt of, for the copies that it asks for.
__device__ inline void publish_writes_of_all() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void put(const CUtensorMap& map, int column, int row, uint32_t from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(&map),
        "r"(from), "r"(column), "r"(row)
        : "memory");
}

// Until what this thread has put was read, but for the last few.
template <int STILL>
__device__ void await_puts() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STILL) : "memory");
}

__device__ inline void store_shared(uint32_t at, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
}

__device__ inline void store_shared(uint32_t at, uint2 words) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(words.x), "r"(words.y) : "memory");
}

__device__ inline uint32_t load_shared(uint32_t at) {
    uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
}

template <typename Word>
__device__ inline Word load_shared_16(uint32_t at) {
    uint32_t words[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at)
                 : "memory");
    return reinterpret_cast<const Word&>(words);
}

// Four 8×8 matrices as a wgmma operand has them: lane 8i + j knows where row j of matrix i is.
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

// Four 8×8 matrices as wgmma's accumulators have them: lane 8i + j knows where row j of matrix i goes.
__device__ inline void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// --- wgmma -------------------------------------------------------------------------------------------------------

// Of rows of 128 bytes, swizzled, eight of them 1024 bytes apart. 16 columns further on is 2 more.
__device__ inline uint64_t matrix(uint32_t at) {
    return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (at & 0x3ffff) >> 4;
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int STILL>
__device__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(STILL) : "memory");
}

// What the compiler knows of z ends here: wgmma writes to it asynchronously.
template <int N>
__device__ __forceinline__ void refresh(float (&z)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(z[i])::"memory");
}

#define OPTEXP_Z8(i) \
    "+f"(z[i]), "+f"(z[i + 1]), "+f"(z[i + 2]), "+f"(z[i + 3]), "+f"(z[i + 4]), "+f"(z[i + 5]), "+f"(z[i + 6]), "+f"(z[i + 7])
#define OPTEXP_Z32(i) OPTEXP_Z8(i), OPTEXP_Z8(i + 8), OPTEXP_Z8(i + 16), OPTEXP_Z8(i + 24)
#define OPTEXP_WGMMA(type, add, operands, ...)                                                                                        \
    asm volatile(                                                                                                     \
        "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\n"                                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                                             \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                            \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                            \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                            \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                            \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                            \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "           \
        operands ";\n}"                                                                             \
        : OPTEXP_Z32(0), OPTEXP_Z32(32), OPTEXP_Z32(64), OPTEXP_Z32(96)                                               \
        : __VA_ARGS__)

// z = x·wᵀ, or z += x·wᵀ, of 64×16 and 256×16. Of eight columns j lane 4g + t of warp i has, from z[4j] on, two in row
// 16i + g and two in row 16i + g + 8, from column 2t on.
template <typename T>
__device__ __forceinline__ void multiply(float (&z)[128], uint64_t x, uint64_t w, bool add) {
    if constexpr (std::is_same_v<T, __half>) {
        OPTEXP_WGMMA("f16", "%130", "%128, %129, add, 1, 1, 0, 0", "l"(x), "l"(w), "r"(int(add)));
    } else {
        OPTEXP_WGMMA("bf16", "%130", "%128, %129, add, 1, 1, 0, 0", "l"(x), "l"(w), "r"(int(add)));
    }
}

// The same with x in registers, as load_matrices leaves it of 16×16 whose quarters it is given from above to below, and
// then from left to right.
__device__ __forceinline__ void multiply(float (&z)[128], const uint32_t (&x)[4], uint64_t w, bool add) {
    OPTEXP_WGMMA(
        "bf16", "%133", "{%128, %129, %130, %131}, %132, add, 1, 1, 0", "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w),
        "r"(int(add)));
}

// z += x·wᵀ of 64×16 and 40×16.
template <typename T>
__device__ __forceinline__ void multiply(float (&z)[20], uint64_t x, uint64_t w) {
#define OPTEXP_WGMMA40(type)                                                                                         \
    asm volatile(                                                                                                    \
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n40k16.f32." type "." type " {"                                             \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19}, "                \
        "%20, %21, add, 1, 1, 0, 0;\n}"                                                                              \
        : OPTEXP_Z8(0), OPTEXP_Z8(8), "+f"(z[16]), "+f"(z[17]), "+f"(z[18]), "+f"(z[19])                             \
        : "l"(x), "l"(w))
    if constexpr (std::is_same_v<T, __half>) {
        OPTEXP_WGMMA40("f16");
    } else {
        OPTEXP_WGMMA40("bf16");
    }
}

// z += x·wᵀ for 8 columns and one warp, whose operands are in registers.
template <typename T>
__device__ __forceinline__ void multiply_few(float* z, const uint32_t (&x)[4], uint32_t w0, uint32_t w1) {
#define OPTEXP_MMA(type)                                                                                             \
    asm volatile(                                                                                                    \
        "mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"   \
        " {%0, %1, %2, %3};"                                                                                         \
        : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])                                                             \
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(w0), "r"(w1))
    if constexpr (std::is_same_v<T, __half>) {
        OPTEXP_MMA("f16");
    } else {
        OPTEXP_MMA("bf16");
    }
}

// The same of 8 terms.
__device__ __forceinline__ void multiply_few(float* z, const uint32_t (&x)[2], uint32_t w) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3])
        : "r"(x[0]), "r"(x[1]), "r"(w));
}

// --- launches, by the host ---------------------------------------------------------------------------------------

// A matrix as the copy engine moves it: boxes of `rows` × 64 elements of 16 bits.
inline int describe(CUtensorMap& map, bool half, const void* matrix, int64_t height, int64_t width, int64_t stride, int rows) {
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

}  // namespace optexp::hopper

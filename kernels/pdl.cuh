// Programmatic dependent launch (PDL): a kernel is launched while the one before still runs, and waits for it on the
// device. From Hopper on:
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace optexp {

// Whether every architecture that this is compiled for has PDL; else launches are ordinary.
constexpr bool PDL = [] {
    for (const int target : {__CUDA_ARCH_LIST__}) {
        if (target < 900) return false;
    }
    return true;
}();

__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether all blocks run at the same time, and none has to wait for another's place.
__device__ inline bool all_at_once() { return uint64_t(gridDim.x) * gridDim.y <= 256; }

// The first line of a kernel whose blocks soon end: where all run at once, the next one may be launched now.
__device__ inline void begin() {
    if (all_at_once()) let_next_begin();
    await_previous();
}

// Launch with PDL. Blocks may begin before the previous kernel ends: `await_previous` comes before each read and write.
// Inputs are not __restrict__: non-coherent loads (ld.global.nc) need not see writes made after the block began.
template <typename... A, typename... P>
int launch_with_pdl(
    void (*kernel)(A...), dim3 blocks, dim3 threads, size_t shared, cudaStream_t stream, const P&... given) {
    cudaLaunchAttribute pdl;
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &pdl;
    config.numAttrs = PDL;
    return cudaLaunchKernelEx(&config, kernel, A(given)...);
}

}  // namespace optexp

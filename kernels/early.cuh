// Kernels that are launched while the one before still runs, and wait for it on the device, from Hopper on:
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace optexp {

// Whether all that this is compiled for can do so; else no launch is early.
constexpr bool EARLY = [] {
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

// Its blocks may begin while the kernel before ends: they await that before they read or write. What they read is not called
// __restrict__, for the loads of what never changes (ld.global.nc) need not see what was written after they began.
template <typename... A, typename... P>
int launch_early(void (*kernel)(A...), dim3 blocks, dim3 threads, size_t shared, cudaStream_t stream, const P&... given) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = EARLY;
    return cudaLaunchKernelEx(&config, kernel, A(given)...);
}

}  // namespace optexp

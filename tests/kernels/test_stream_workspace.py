"""Who gets which memory, and who gives it back: the host's part of stream_workspace.cuh, with a CUDA of a few lines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"

CUDA = r"""
#pragma once
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <map>
#include <vector>
#define CUDART_CB
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum { cudaStreamNonBlocking, cudaUserObjectNoDestructorSync, cudaGraphUserObjectMove };
struct Graph { std::vector<std::function<void()>> destructors; };
struct Object { void* what; void (*destroy)(void*); };
struct Stream { unsigned long long id = 0, capture = 0; Graph* graph = nullptr; };
using cudaStream_t = Stream*;
using cudaGraph_t = Graph*;
using cudaUserObject_t = Object*;

inline auto mode = cudaStreamCaptureModeGlobal;
inline int device = 0, room = 1000, allocations = 0, last_error = 0;

inline cudaError_t answer(bool right) { return right ? cudaSuccess : cudaError_t(last_error = 2); }
inline cudaError_t cudaGetLastError() { auto e = cudaError_t(last_error); last_error = 0; return e; }
inline cudaError_t cudaGetDevice(int* d) { *d = device; return cudaSuccess; }
inline cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) {  // what asks for it ends a capture
    if (!s->graph) *id = s->id;
    return answer(!s->graph);
}
inline cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph) {
    *status = s->graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *id = s->capture, *graph = s->graph;
    return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
    std::swap(*m, mode);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, int) { *s = new Stream; return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t s) { delete s; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaFree(void* p) { allocations--; free(p); return cudaSuccess; }
template <typename T>
cudaError_t cudaMalloc(T** p, size_t size) {
    if (mode != cudaStreamCaptureModeRelaxed || allocations == room) return answer(false);
    allocations++;
    *p = (T*)malloc(size);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int, size_t size, cudaStream_t) { *(int*)p = 0; return cudaSuccess; }
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* o, void* what, void (*destroy)(void*), int, int) {
    *o = new Object{what, destroy};
    return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, int, int) {
    g->destructors.push_back([o] { o->destroy(o->what); delete o; });
    return cudaSuccess;
}
"""

PROGRAM = r"""
#include <cstdio>
#include <set>
#include "stream_workspace.cuh"

#define CHECK(what) if (!(what)) return printf("line %d: %s\n", __LINE__, #what), 1

void destroy(Graph& graph) { for (auto& each : graph.destructors) each(); }

int main() {
    using optexp::StreamWorkspaces;
    StreamWorkspaces<int> workspaces;
    Stream one{1}, two{2};
    int* const first = workspaces.of(&one);
    CHECK(first != nullptr && *first == 0);
    CHECK(workspaces.of(&one) == first && workspaces.of(&two) != first);
    CHECK(mode == cudaStreamCaptureModeGlobal);  // as it was
    device = 1;
    CHECK(workspaces.of(&one) != first);
    device = 0;

    Graph graph, again;
    one.graph = &graph, one.capture = 7;
    int* const captured = workspaces.of(&one);
    CHECK(captured != first && workspaces.of(&one) == captured && graph.destructors.size() == 1);
    two.graph = &graph, two.capture = 7;  // forked: another branch of the same graph
    CHECK(workspaces.of(&two) != captured);
    one.graph = nullptr;
    CHECK(workspaces.of(&one) == first);
    one.graph = &again, one.capture = 8;  // while the first may be replayed
    int* const other = workspaces.of(&one);
    CHECK(other != captured && other != first);
    *captured = 5;
    const int before = allocations;
    destroy(graph);
    Graph third;
    one.graph = &third, one.capture = 9;
    int* const reused = workspaces.of(&one);
    two.graph = &third, two.capture = 9;
    CHECK(allocations == before && (*reused == 5 || *workspaces.of(&two) == 5));  // and left as it was

    StreamWorkspaces<int> others;
    room = allocations;  // no more memory
    Stream three{3};
    CHECK(others.of(&three) == nullptr && last_error == 0);
    room = 1000000;
    CHECK(others.of(&three) != nullptr);
    std::set<int*> different;
    for (unsigned long long id = 10; id < 1000; id++) {
        Stream stream{id};
        different.insert(others.of(&stream));
    }
    CHECK(different.count(nullptr) == 1 && different.size() == 256);  // one of which has stream 3
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_each_row_of_launches_has_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime.h").write_text(CUDA)
    (tmp_path / "stream_workspace.cuh").write_text((KERNELS / "stream_workspace.cuh").read_text())
    (tmp_path / "program.cpp").write_text(PROGRAM)
    program = str(tmp_path / "program")
    options = ["-std=c++17", "-Wall", "-Werror", "-pthread"]
    compiler = ["c++", *options, f"-I{tmp_path}", str(tmp_path / "program.cpp"), "-o", program]
    done = subprocess.run(compiler, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

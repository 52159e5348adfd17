// Zero-initialised per-stream workspace that persists between launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace optexp {

// Of launches that come one after the other: those of a stream; and, as two graphs may run at once, those of a stream
// while it is captured, until the graph is gone. Torch knows nothing of this memory: what it has while a graph is captured
// would belong to the graph. What a graph gives back is left as it is, too.
template <typename Workspace>
class StreamWorkspaces {
   public:
    // Null where there is no memory, or too many have some.
    Workspace* of(cudaStream_t stream) {
        int device = 0;
        unsigned long long id = reinterpret_cast<uintptr_t>(stream), capture = 0;
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaGraph_t graph = nullptr;
        if (failed(cudaGetDevice(&device))) return nullptr;
        if (failed(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph))) return nullptr;
        const bool captured = status == cudaStreamCaptureStatusActive;
        // A handle may stand for another stream later. The id of a captured stream must not be queried.
        if (!captured && failed(cudaStreamGetId(stream, &id))) return nullptr;
        const Key key = {device, id, captured ? capture : 0};
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (auto found = given.find(key); found != given.end()) return found->second;
        }
        auto mode = cudaStreamCaptureModeRelaxed;  // memory may be asked for though this or another thread captures
        cudaThreadExchangeStreamCaptureMode(&mode);
        Workspace* workspace = spare(device);
        if (workspace != nullptr) {
            const auto [own, is_new] = give(workspace, key);
            if (is_new && captured) await_end(graph, key);
            workspace = own;
        }
        cudaThreadExchangeStreamCaptureMode(&mode);
        return workspace;
    }

   private:
    using Key = std::tuple<int, unsigned long long, unsigned long long>;  // device, stream, capture
    struct Loan {
        StreamWorkspaces* workspaces;
        Key key;
    };
    static constexpr int MOST = 256;

    std::mutex mutex;  // never held while CUDA is asked for something
    std::map<Key, Workspace*> given;
    std::map<int, std::vector<Workspace*>> spares;
    int made = 0;

    static bool failed(cudaError_t error) {
        if (error != cudaSuccess) cudaGetLastError();  // clears the error for later calls
        return error != cudaSuccess;
    }

    Workspace* spare(int device) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (auto& of_device = spares[device]; !of_device.empty()) {
                Workspace* workspace = of_device.back();
                of_device.pop_back();
                return workspace;
            }
            if (made == MOST) return nullptr;
            made++;
        }
        Workspace* workspace = nullptr;
        cudaStream_t aside = nullptr;  // never captured
        const bool right = !failed(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking)) &&
                           !failed(cudaMalloc(&workspace, sizeof(Workspace))) &&
                           !failed(cudaMemsetAsync(workspace, 0, sizeof(Workspace), aside)) &&
                           !failed(cudaStreamSynchronize(aside));
        if (aside != nullptr) failed(cudaStreamDestroy(aside));
        if (right) return workspace;
        if (workspace != nullptr) failed(cudaFree(workspace));
        const std::lock_guard<std::mutex> lock(mutex);
        made--;
        return nullptr;
    }

    // What the key has now, and whether it is this.
    std::pair<Workspace*, bool> give(Workspace* workspace, const Key& key) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto [place, is_new] = given.emplace(key, workspace);
        if (!is_new) spares[std::get<0>(key)].push_back(workspace);  // another thread was quicker
        return {place->second, is_new};
    }

    // The graph owns its workspace until it is destroyed; for good, where CUDA can't report that.
    void await_end(cudaGraph_t graph, const Key& key) {
        cudaUserObject_t object;
        auto* loan = new Loan{this, key};
        if (failed(cudaUserObjectCreate(&object, loan, give_back, 1, cudaUserObjectNoDestructorSync))) {
            delete loan;
        } else {
            failed(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
        }
    }

    static void CUDART_CB give_back(void* what) {  // where CUDA must not be called
        auto* loan = static_cast<Loan*>(what);
        StreamWorkspaces& workspaces = *loan->workspaces;
        {
            const std::lock_guard<std::mutex> lock(workspaces.mutex);
            if (auto found = workspaces.given.find(loan->key); found != workspaces.given.end()) {
                workspaces.spares[std::get<0>(loan->key)].push_back(found->second);
                workspaces.given.erase(found);
            }
        }
        delete loan;
    }
};

}  // namespace optexp

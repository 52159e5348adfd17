// Memory that launches find as the one before has left it: zero at first, one for each row of launches.
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
template <typename Board>
class Boards {
   public:
    // Null where there is no memory, or too many have some.
    Board* of(cudaStream_t stream) {
        int device = 0;
        unsigned long long id = reinterpret_cast<uintptr_t>(stream), capture = 0;
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaGraph_t graph = nullptr;
        if (failed(cudaGetDevice(&device))) return nullptr;
        if (failed(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph))) return nullptr;
        const bool captured = status == cudaStreamCaptureStatusActive;
        // A handle may stand for another stream later. Of one that is captured nobody may ask what its number is.
        if (!captured && failed(cudaStreamGetId(stream, &id))) return nullptr;
        const Key key = {device, id, captured ? capture : 0};
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (auto found = given.find(key); found != given.end()) return found->second;
        }
        auto mode = cudaStreamCaptureModeRelaxed;  // memory may be asked for though this or another thread captures
        cudaThreadExchangeStreamCaptureMode(&mode);
        Board* board = spare(device);
        if (board != nullptr) {
            const auto [own, is_new] = give(board, key);
            if (is_new && captured) await_end(graph, key);
            board = own;
        }
        cudaThreadExchangeStreamCaptureMode(&mode);
        return board;
    }

   private:
    using Key = std::tuple<int, unsigned long long, unsigned long long>;  // device, stream, capture
    struct Loan {
        Boards* boards;
        Key key;
    };
    static constexpr int MOST = 256;

    std::mutex mutex;  // never held while CUDA is asked for something
    std::map<Key, Board*> given;
    std::map<int, std::vector<Board*>> spares;
    int made = 0;

    static bool failed(cudaError_t error) {
        if (error != cudaSuccess) cudaGetLastError();  // nobody else is to find it
        return error != cudaSuccess;
    }

    Board* spare(int device) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            if (auto& of_device = spares[device]; !of_device.empty()) {
                Board* board = of_device.back();
                of_device.pop_back();
                return board;
            }
            if (made == MOST) return nullptr;
            made++;
        }
        Board* board = nullptr;
        cudaStream_t aside = nullptr;  // which nobody captures
        const bool right = !failed(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking)) &&
                           !failed(cudaMalloc(&board, sizeof(Board))) &&
                           !failed(cudaMemsetAsync(board, 0, sizeof(Board), aside)) && !failed(cudaStreamSynchronize(aside));
        if (aside != nullptr) failed(cudaStreamDestroy(aside));
        if (right) return board;
        if (board != nullptr) failed(cudaFree(board));
        const std::lock_guard<std::mutex> lock(mutex);
        made--;
        return nullptr;
    }

    // What the key has now, and whether it is this.
    std::pair<Board*, bool> give(Board* board, const Key& key) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto [place, is_new] = given.emplace(key, board);
        if (!is_new) spares[std::get<0>(key)].push_back(board);  // another thread was quicker
        return {place->second, is_new};
    }

    // The graph has its board as long as it can be replayed. If that can't be told, it has it for good.
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
        Boards& boards = *loan->boards;
        {
            const std::lock_guard<std::mutex> lock(boards.mutex);
            if (auto found = boards.given.find(loan->key); found != boards.given.end()) {
                boards.spares[std::get<0>(loan->key)].push_back(found->second);
                boards.given.erase(found);
            }
        }
        delete loan;
    }
};

}  // namespace optexp

// Memory that all ranks of a host share, for sums. Added to Horovod's source.
//
// A message between processes of a host goes through the kernel, page by page. Through memory that
// both have mapped it is a plain copy, which takes a quarter of the time.
//
// A sum has a block for each rank, which forms it. Each rank has a few rows of places, with one place
// for each block: there it hands out its values for the other blocks, and the sums of its own.

#ifndef HOROVOD_SHARED_MEMORY_H
#define HOROVOD_SHARED_MEMORY_H

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "mpi.h"

namespace horovod {
namespace common {

class SharedMemory {
public:
  static constexpr int64_t kRows = 4; // so that a rank can be ahead of others

  // How many pieces a rank has handed out, added and taken since the memory was made, and the number
  // of the last one, from 1, in which it found a sum that is not finite.
  struct alignas(64) Progress {
    std::atomic<int64_t> handed_out, added, taken, not_finite;
    static_assert(std::atomic<int64_t>::is_always_lock_free, "a lock is of one process only");
  };

  // Collective: return the memory of a communicator's ranks; null on all of them if they do not see
  // each other's processes, as on several hosts, if memory is short, or with
  // HOROVOD_MPI_SHARED_MEMORY=0. It lives as long as the communicator. `agree`: reduces a few values
  // over all ranks.
  template <typename Agree> static SharedMemory* Of(MPI_Comm comm, Agree agree) {
    static const int key = NewKey();
    void* found;
    int is_known;
    MPI_Comm_get_attr(comm, key, &found, &is_known);
    if (!is_known) {
      found = new SharedMemory(comm, agree);
      MPI_Comm_set_attr(comm, key, found);
    }
    auto memory = static_cast<SharedMemory*>(found);
    return memory->begin_ ? memory : nullptr;
  }

  SharedMemory(const SharedMemory&) = delete;

  int64_t PieceBytes() const { return piece_bytes_; }

  Progress& ProgressOf(int rank) const { return reinterpret_cast<Progress*>(begin_)[rank]; }

  // The place where a rank hands out its values of a piece of another rank's block, or the sums of
  // its own block.
  char* Place(int rank, int64_t piece, int block) const {
    int64_t row = rank * kRows + piece % kRows;
    return begin_ + size_ * sizeof(Progress) + (row * size_ + block) * piece_bytes_;
  }

  int64_t pieces_before = 0; // of all earlier sums

private:
  static constexpr int64_t kMostBytes = 16 << 20;
  static constexpr int64_t kLongestPieceBytes = 1 << 18; // pieces stay in a core's cache
  static constexpr int64_t kShortestPieceBytes = 1 << 12;

  // A file in memory, which is gone with the last process that has it, however that ends.
  struct File {
    char name[48], path[48]; // the path is empty if there is none
  };

  template <typename Agree> SharedMemory(MPI_Comm comm, Agree agree) {
    int rank;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size_);
    int64_t places = kRows * size_ * size_;
    piece_bytes_ = std::min(kLongestPieceBytes, kMostBytes / places / 64 * 64);
    bytes_ = size_ * sizeof(Progress) + places * piece_bytes_;
    File shared{};
    int file = rank == 0 && IsWanted() ? Make(shared) : -1;
    agree(&shared, sizeof(shared), MPI_BYTE, MPI_BOR);
    if (rank != 0) {
      file = Open(shared);
    }
    void* begin = MAP_FAILED;
    if (file >= 0) {
      begin = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    begin_ = begin == MAP_FAILED ? nullptr : static_cast<char*>(begin);
    int all_have_it = begin_ != nullptr;
    agree(&all_have_it, 1, MPI_INT, MPI_MIN);
    if (file >= 0) { // the others have opened it
      close(file);
    }
    if (!all_have_it) {
      Release();
    }
  }

  ~SharedMemory() { Release(); }

  bool IsWanted() const {
    const char* chosen = std::getenv("HOROVOD_MPI_SHARED_MEMORY");
    return size_ > 1 && piece_bytes_ >= kShortestPieceBytes &&
           !(chosen && std::strcmp(chosen, "0") == 0);
  }

  // Return a new file with memory of its own, or -1.
  int Make(File& made) const {
    std::random_device random;
    std::snprintf(made.name, sizeof(made.name), "horovod-%08x%08x", random(), random());
    int file = memfd_create(made.name, MFD_CLOEXEC), error;
    if (file < 0) {
      return -1;
    }
    do {
      error = posix_fallocate(file, 0, bytes_);
    } while (error == EINTR);
    if (error) {
      close(file);
      return -1;
    }
    std::snprintf(made.path, sizeof(made.path), "/proc/%d/fd/%d", getpid(), file);
    return file;
  }

  // Return the file that another rank has made, or -1, as on another host, where the path is that of
  // another process.
  static int Open(const File& made) {
    char found[sizeof(made.name) + 32];
    auto length = std::max<ssize_t>(0, readlink(made.path, found, sizeof(found)));
    bool is_it = std::string(found, length) == "/memfd:" + std::string(made.name) + " (deleted)";
    return is_it ? open(made.path, O_RDWR | O_CLOEXEC) : -1;
  }

  void Release() {
    if (begin_) {
      munmap(begin_, bytes_);
    }
    begin_ = nullptr;
  }

  static int NewKey() {
    int key;
    auto forget = [](MPI_Comm, int, void* memory, void*) {
      delete static_cast<SharedMemory*>(memory);
      return MPI_SUCCESS;
    };
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, forget, &key, nullptr);
    return key;
  }

  char* begin_ = nullptr;
  int size_;
  int64_t piece_bytes_, bytes_;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_SHARED_MEMORY_H

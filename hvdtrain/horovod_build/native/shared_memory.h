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
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "mpi.h"

namespace horovod {
namespace common {

class SharedMemory {
public:
  static constexpr int64_t kRows = 4; // so that a rank can be ahead of others

  // How many pieces a rank has handed out, added and taken since the memory was made.
  struct alignas(64) Progress {
    std::atomic<int64_t> handed_out, added, taken;
  };

  // Collective: return the memory of a communicator's ranks; null on all of them if they are not on
  // one host, if it lacks memory, or with HOROVOD_MPI_SHARED_MEMORY=0. It lives as long as the
  // communicator.
  static SharedMemory* Of(MPI_Comm comm) {
    static const int key = NewKey();
    void* found;
    int is_known;
    MPI_Comm_get_attr(comm, key, &found, &is_known);
    if (!is_known) {
      found = new SharedMemory(comm);
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
  static constexpr int64_t kMostBytes = 16 << 20;       // Docker gives a container 64 MiB
  static constexpr int64_t kLongestPieceBytes = 1 << 18; // pieces stay in a core's cache
  static constexpr int64_t kShortestPieceBytes = 1 << 12;

  explicit SharedMemory(MPI_Comm comm) {
    int rank;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size_);
    int64_t places = kRows * size_ * size_;
    piece_bytes_ = std::min(kLongestPieceBytes, kMostBytes / places / 64 * 64);
    bytes_ = size_ * sizeof(Progress) + places * piece_bytes_;
    char path[64] = ""; // of a file that is in memory
    int file = -1;
    if (IsWanted(comm) && rank == 0) {
      auto now = std::chrono::system_clock::now().time_since_epoch().count();
      std::snprintf(path, sizeof(path), "/dev/shm/horovod-%d-%lld", getpid(), (long long)now);
      file = MakeFile(path, bytes_);
      if (file < 0) {
        *path = 0;
      }
    }
    MPI_Bcast(path, sizeof(path), MPI_CHAR, 0, comm);
    if (rank != 0 && *path) {
      file = open(path, O_RDWR | O_CLOEXEC);
    }
    void* begin = MAP_FAILED;
    if (file >= 0) {
      begin = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      close(file);
    }
    begin_ = begin == MAP_FAILED ? nullptr : static_cast<char*>(begin);
    int all_have_it = begin_ != nullptr;
    MPI_Allreduce(MPI_IN_PLACE, &all_have_it, 1, MPI_INT, MPI_MIN, comm);
    if (rank == 0 && *path) {
      unlink(path); // the memory goes with the last rank, however it ends
    }
    if (!all_have_it) {
      Release();
    }
  }

  ~SharedMemory() { Release(); }

  // Collective: whether rank 0 is to make the memory.
  bool IsWanted(MPI_Comm comm) const {
    const char* chosen = std::getenv("HOROVOD_MPI_SHARED_MEMORY");
    MPI_Comm host;
    int on_host;
    MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &on_host);
    MPI_Comm_free(&host);
    return on_host == size_ && size_ > 1 && piece_bytes_ >= kShortestPieceBytes &&
           !(chosen && std::strcmp(chosen, "0") == 0);
  }

  // Return a new file of so many bytes, or -1 where they would not leave as many to others, such as
  // Open MPI and processes that read data.
  static int MakeFile(const char* path, int64_t bytes) {
    int file = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) {
      return -1;
    }
    struct statvfs room;
    int error = fstatvfs(file, &room);
    if (!error && room.f_blocks > 0 && int64_t(room.f_bavail * room.f_frsize) < 2 * bytes) {
      error = ENOSPC;
    }
    if (!error) {
      do {
        error = posix_fallocate(file, 0, bytes);
      } while (error == EINTR);
    }
    if (error) {
      close(file);
      unlink(path);
      return -1;
    }
    return file;
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

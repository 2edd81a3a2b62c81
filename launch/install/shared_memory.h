// Sums in memory that all ranks of a host share. `launch/setup` adds this file to Horovod's source.
//
// A message between processes of a host goes through the kernel, page by page. Through memory that
// both have mapped it is a plain copy, which takes a quarter of the time.
//
// A sum has a block for each rank, which forms it. Each rank has a few rows of places, with one place
// for each block: there it hands out its values for the other blocks, and gives the sums of its own.

#ifndef HOROVOD_SHARED_MEMORY_H
#define HOROVOD_SHARED_MEMORY_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace horovod {
namespace common {

class SharedMemory {
public:
  static constexpr int64_t kRows = 4; // so that a rank can be ahead of others

  // How many pieces a rank has handed out, added, given and taken since the memory was made.
  struct alignas(64) Progress {
    std::atomic<int64_t> handed_out, added, given, taken;
    std::atomic<bool> has_failed;
  };

  // How ranks agree before they share memory. Both are collective.
  struct Agreement {
    std::function<void(void* values, int bytes)> take_from_first; // rank 0's, on all ranks
    std::function<bool(bool is_true)> is_true_for_all;
  };

  // Collective: none of the ranks has the memory if one of them cannot have it, or has
  // HOROVOD_SHARED_MEMORY=0. It has no name that could be left over, and goes with the last rank.
  SharedMemory(int rank, int size, const Agreement& agree) : rank_(rank), size_(size) {
    int64_t places = kRows * size * size;
    piece_bytes_ = std::min(kLongestPieceBytes, kMostBytes / places / 64 * 64);
    bytes_ = sizeof(Token) + size * sizeof(Progress) + places * piece_bytes_;
    Invitation invitation{};
    if (rank == 0 && IsWanted()) {
      invitation = Invite();
    }
    agree.take_from_first(&invitation, sizeof(invitation));
    if (!agree.is_true_for_all(IsWanted() && Join(invitation))) {
      Release();
    }
  }

  SharedMemory(const SharedMemory&) = delete;

  ~SharedMemory() { Release(); }

  bool IsThere() const { return begin_ != nullptr; }

  int Rank() const { return rank_; }

  int Size() const { return size_; }

  int64_t PieceBytes() const { return piece_bytes_; }

  Progress& ProgressOf(int rank) const {
    return reinterpret_cast<Progress*>(begin_ + sizeof(Token))[rank];
  }

  // The place where a rank hands out its values of a piece of another rank's block, or gives the
  // sums of its own block.
  char* Place(int rank, int64_t piece, int block) const {
    int64_t row = rank * kRows + piece % kRows;
    return begin_ + sizeof(Token) + size_ * sizeof(Progress) + (row * size_ + block) * piece_bytes_;
  }

  // Return which other rank has ended or failed, or -1.
  int Lost() const {
    for (int rank = 0; rank < size_; ++rank) {
      struct flock lock = LockOf(rank);
      bool is_free = fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
      if (rank != rank_ && (is_free || ProgressOf(rank).has_failed)) {
        return rank;
      }
    }
    return -1;
  }

  int64_t added_before = 0, given_before = 0; // pieces of all earlier sums

private:
  static constexpr int64_t kMostBytes = 16 << 20;
  static constexpr int64_t kLongestPieceBytes = 1 << 18; // pieces stay in a core's cache
  static constexpr int64_t kShortestPieceBytes = 1 << 12;

  bool IsWanted() const {
    const char* chosen = std::getenv("HOROVOD_SHARED_MEMORY");
    return piece_bytes_ >= kShortestPieceBytes && !(chosen && std::strcmp(chosen, "0") == 0);
  }

  struct alignas(64) Token {
    uint64_t words[2];
  };

  // Where rank 0 has the memory, and what is written there.
  struct Invitation {
    int process, file; // 0: nowhere
    Token token;
  };

  Invitation Invite() {
    file_ = memfd_create("horovod", MFD_CLOEXEC);
    if (file_ < 0 || !Reserve()) {
      return {};
    }
    std::random_device random;
    auto word = [&] { return uint64_t(random()) << 32 | random(); };
    Token token{word(), word()};
    std::memcpy(begin_, token.words, sizeof(token.words));
    return {getpid(), file_, token};
  }

  bool Reserve() {
    int error;
    do {
      error = posix_fallocate(file_, 0, bytes_);
    } while (error == EINTR);
    return !error && Map();
  }

  // Processes with other numbers, as in another container, lead to other memory, or to none.
  bool Join(const Invitation& invitation) {
    if (invitation.process == 0) {
      return false;
    }
    if (rank_ != 0) {
      std::string path = "/proc/" + std::to_string(invitation.process) + "/fd/" +
                         std::to_string(invitation.file);
      struct stat found;
      file_ = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
      if (file_ < 0 || fstat(file_, &found) != 0 || found.st_size != bytes_ || !Map()) {
        return false;
      }
    }
    const auto& words = invitation.token.words;
    return std::memcmp(begin_, words, sizeof(words)) == 0 && Lock();
  }

  bool Map() {
    void* begin = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    begin_ = begin == MAP_FAILED ? nullptr : static_cast<char*>(begin);
    return begin_;
  }

  // The kernel releases the lock when this process ends, however it does.
  bool Lock() {
    struct flock lock = LockOf(rank_);
    return fcntl(file_, F_SETLK, &lock) == 0;
  }

  static struct flock LockOf(int rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
  }

  void Release() {
    if (begin_) {
      munmap(begin_, bytes_);
    }
    if (file_ >= 0) {
      close(file_);
    }
    begin_ = nullptr;
    file_ = -1;
  }

  char* begin_ = nullptr;
  int file_ = -1, rank_, size_;
  int64_t piece_bytes_, bytes_;
};

// One sum. `Wait`: called with a function that tells whether others are as far as is needed.
template <typename Wait> class SumInMemory {
public:
  struct Span {
    char* at;
    int64_t bytes;
  };

  // `blocks`: the values that each rank forms the sums of.
  SumInMemory(SharedMemory& memory, std::vector<Span> blocks, Wait wait)
      : memory_(memory), own_(memory.ProgressOf(memory.Rank())), blocks_(std::move(blocks)),
        wait_(wait) {
    int64_t longest = 0;
    for (Span block : blocks_) {
      longest = std::max(longest, block.bytes);
    }
    pieces_ = (longest + memory.PieceBytes() - 1) / memory.PieceBytes();
  }

  // Collective: `add(own, terms)` turns a piece of this rank's block into its sum over all ranks;
  // `terms(rank)` are another rank's values, which may be overwritten.
  template <typename Add> void Sum(Add add) {
    for (int64_t step = 0; step < pieces_ + 2 * kAhead; ++step) {
      HandOut(step);
      AddOwn(step - kAhead, add);
      Give(step - kAhead);
      Take(step - 2 * kAhead);
    }
    memory_.added_before += pieces_;
    memory_.given_before += pieces_;
  }

  // Collective: the first half of `Sum`, after which each rank has the sums of its own block.
  template <typename Add> void AddBlocks(Add add) {
    for (int64_t step = 0; step < pieces_ + kAhead; ++step) {
      HandOut(step);
      AddOwn(step - kAhead, add);
    }
    memory_.added_before += pieces_;
  }

  // Collective: the second half, after which each rank has those of all blocks.
  void ShareBlocks() {
    for (int64_t step = 0; step < pieces_ + kAhead; ++step) {
      Give(step);
      Take(step - kAhead);
    }
    memory_.given_before += pieces_;
  }

private:
  static constexpr int64_t kAhead = 2; // pieces
  static_assert(kAhead < SharedMemory::kRows, "a rank would wait for itself");
  using Counter = std::atomic<int64_t> SharedMemory::Progress::*;

  void HandOut(int64_t number) {
    if (number >= pieces_) {
      return;
    }
    ForOthers([&](int rank) {
      Until(rank, &SharedMemory::Progress::added, // the place is free
            memory_.added_before + number - SharedMemory::kRows);
      Copy(memory_.Place(memory_.Rank(), memory_.added_before + number, rank), Piece(rank, number));
    });
    own_.handed_out.fetch_add(1, std::memory_order_release);
  }

  template <typename Add> void AddOwn(int64_t number, Add add) {
    if (number < 0 || number >= pieces_) {
      return;
    }
    int64_t piece = memory_.added_before + number;
    add(Piece(memory_.Rank(), number), [&](int rank) {
      Until(rank, &SharedMemory::Progress::handed_out, piece);
      return memory_.Place(rank, piece, memory_.Rank());
    });
    own_.added.fetch_add(1, std::memory_order_release);
  }

  void Give(int64_t number) {
    if (number < 0 || number >= pieces_) {
      return;
    }
    int64_t piece = memory_.given_before + number;
    ForOthers([&](int rank) {
      Until(rank, &SharedMemory::Progress::taken, piece - SharedMemory::kRows);
    });
    Copy(memory_.Place(memory_.Rank(), piece, memory_.Rank()), Piece(memory_.Rank(), number));
    own_.given.fetch_add(1, std::memory_order_release);
  }

  void Take(int64_t number) {
    if (number < 0 || number >= pieces_) {
      return;
    }
    ForOthers([&](int rank) {
      int64_t piece = memory_.given_before + number;
      Until(rank, &SharedMemory::Progress::given, piece);
      Span part = Piece(rank, number);
      std::memcpy(part.at, memory_.Place(rank, piece, rank), part.bytes);
    });
    own_.taken.fetch_add(1, std::memory_order_release);
  }

  // Wait until a rank's counter is beyond a piece.
  void Until(int rank, Counter counter, int64_t piece) {
    wait_([&] {
      return (memory_.ProgressOf(rank).*counter).load(std::memory_order_acquire) > piece;
    });
  }

  static void Copy(char* place, Span piece) { std::memcpy(place, piece.at, piece.bytes); }

  // A piece of a block, empty after the last one.
  Span Piece(int block, int64_t number) const {
    int64_t begin = std::min(number * memory_.PieceBytes(), blocks_[block].bytes);
    int64_t end = std::min(begin + memory_.PieceBytes(), blocks_[block].bytes);
    return {blocks_[block].at + begin, end - begin};
  }

  // Call `use` with each other rank, from the next one on.
  template <typename Use> void ForOthers(Use use) const {
    for (int step = 1; step < memory_.Size(); ++step) {
      use((memory_.Rank() + step) % memory_.Size());
    }
  }

  SharedMemory& memory_;
  SharedMemory::Progress& own_;
  std::vector<Span> blocks_;
  Wait wait_;
  int64_t pieces_;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_SHARED_MEMORY_H

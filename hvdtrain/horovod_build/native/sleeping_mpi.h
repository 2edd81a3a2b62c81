// MPI collectives that sleep while they wait. Added to Horovod's source.
//
// Open MPI's own spin until the last rank has arrived, also in the middle of an operation. Where
// workers or other programs occupy all cores, that takes time from those for which they wait.
// Point-to-point messages can be tested for instead, with sleeps in between.
//
// The order of addition is fixed, whatever Open MPI would choose (hvdtrain/ring/orders.py):
//   up to kFewBytes a rank, or fewer elements than ranks: recursive doubling, of adjacent ranks, then
//     of adjacent pairs, and so on; before, ranks beyond a power of two are added to their neighbours;
//   else a ring: blocks as even as possible, the first ones longer; the sum of block k begins at
//     rank k and goes to the right. If all ranks share memory, rank k forms this sum there.

#ifndef HOROVOD_SLEEPING_MPI_H
#define HOROVOD_SLEEPING_MPI_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "mpi.h"
#include "shared_memory.h"
#include "waiting.h"

namespace horovod {
namespace common {

class SleepingMpi {
public:
  SleepingMpi(MPI_Comm comm, WaitFor wait_for) : comm_(comm), wait_for_(wait_for) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
  }

  // Collective: reduce `values` over all ranks, in place. `op` must be commutative. (Which rank's NaN
  // a minimum or maximum keeps, or which zero, depends on the way.) Throws Stalled.
  int Allreduce(void* values, int64_t count, MPI_Datatype type, MPI_Op op) {
    Take(values, type, op);
    if (count < size_ || count * item_bytes_ <= kFewBytes * size_) {
      Double(count);
      is_finite_ = AreFinite(values_, count);
      return code_;
    }
    // Sums of bits, for which ranks are waited for, are never so long.
    auto agree = [&](void* few, int64_t many, MPI_Datatype of, MPI_Op by) {
      SleepingMpi agreement(comm_, wait_for_);
      agreement.Take(few, of, by);
      agreement.Double(many);
    };
    SharedMemory* memory =
        wait_for_ == WaitFor::kMessages ? SharedMemory::Of(comm_, agree) : nullptr;
    memory ? InMemory(count, *memory) : Ring(count);
    return code_;
  }

  // Whether all elements of the result are known to be finite: floats or doubles, which were looked at
  // while they were in a core's cache. After a ring over messages it is not known.
  bool IsFinite() const { return is_finite_ && code_ == MPI_SUCCESS; }

private:
  static constexpr int64_t kFewBytes = 4096, kPieceBytes = 1 << 18; // pieces stay in a core's cache
  // Each message is waited for by itself: a long one makes progress that cannot be seen.
  static constexpr int64_t kLongestMessageBytes = 1 << 24;
  static constexpr int64_t kAhead = 2; // pieces
  static_assert(kAhead < SharedMemory::kRows, "a rank would wait for itself");
  static constexpr int kTag = 1601;

  void Take(void* values, MPI_Datatype type, MPI_Op op) {
    values_ = static_cast<char*>(values);
    type_ = type;
    op_ = op;
    MPI_Type_size(type, &item_bytes_);
  }

  void Double(int64_t count) {
    int adjacent = 1;
    while (2 * adjacent <= size_) {
      adjacent *= 2;
    }
    int extra = size_ - adjacent;
    if (rank_ < 2 * extra && rank_ % 2 == 0) { // added to its neighbour, which returns the sum
      Begin(MPI_Isend, values_, count, rank_ + 1);
      Await();
      Begin(MPI_Irecv, values_, count, rank_ + 1);
      Await();
      return;
    }
    char* arrived = Scratch(count);
    if (rank_ < 2 * extra) {
      Begin(MPI_Irecv, arrived, count, rank_ - 1);
      Await();
      MPI_Reduce_local(arrived, values_, count, type_, op_);
    }
    int place = rank_ < 2 * extra ? rank_ / 2 : rank_ - extra;
    for (int distance = 1; distance < adjacent; distance *= 2) {
      int other = place ^ distance;
      other = other < extra ? 2 * other + 1 : other + extra;
      Begin(MPI_Irecv, arrived, count, other);
      Begin(MPI_Isend, values_, count, other);
      Await();
      MPI_Reduce_local(arrived, values_, count, type_, op_);
    }
    if (rank_ < 2 * extra) {
      Begin(MPI_Isend, values_, count, rank_ - 1);
      Await();
    }
  }

  void Ring(int64_t count) {
    int right = (rank_ + 1) % size_, left = (rank_ + size_ - 1) % size_;
    int64_t piece = kPieceBytes / item_bytes_;
    char* scratch = Scratch(2 * piece);
    for (int step = 0; step < size_ - 1; ++step) {
      ForPieces(count, rank_ - step, piece,
                [&](char* at, int items) { Begin(MPI_Isend, at, items, right); });
      std::vector<std::pair<char*, int>> pieces;
      ForPieces(count, rank_ - step - 1, piece,
                [&](char* at, int items) { pieces.emplace_back(at, items); });
      // Two are on their way at any time, and one is added while the other arrives.
      MPI_Request arriving[2];
      auto receive = [&](size_t number) {
        MPI_Irecv(scratch + number % 2 * piece * item_bytes_, pieces[number].second, type_, left,
                  kTag, comm_, &arriving[number % 2]);
      };
      for (size_t number = 0; number < std::min<size_t>(2, pieces.size()); ++number) {
        receive(number);
      }
      for (size_t number = 0; number < pieces.size(); ++number) {
        Await(arriving[number % 2], left);
        MPI_Reduce_local(scratch + number % 2 * piece * item_bytes_, pieces[number].first,
                         pieces[number].second, type_, op_);
        if (number + 2 < pieces.size()) {
          receive(number + 2);
        }
      }
      Await();
    }
    for (int step = 0; step < size_ - 1; ++step) {
      int64_t most = kLongestMessageBytes / item_bytes_;
      ForPieces(count, rank_ - step, most,
                [&](char* at, int items) { Begin(MPI_Irecv, at, items, left); });
      ForPieces(count, rank_ - step + 1, most,
                [&](char* at, int items) { Begin(MPI_Isend, at, items, right); });
      Await();
    }
  }

  // The sums of the ring. Each rank hands out its values of the other blocks, adds those of its own
  // block, and takes the sums of the others, a few pieces later each time.
  void InMemory(int64_t count, SharedMemory& memory) {
    const int64_t longest = memory.PieceBytes() / item_bytes_, before = memory.pieces_before;
    const int64_t pieces = ((count + size_ - 1) / size_ + longest - 1) / longest;
    auto of = [&](int block, int64_t number) { return PieceOf(count, block, number, longest); };
    auto place = [&](int rank, int64_t number, int block) {
      return memory.Place(rank, before + number, block);
    };
    auto until = [&](std::atomic<int64_t>& progress, int64_t number) {
      auto is_done = [&] {
        if (progress.load(std::memory_order_acquire) > before + number) {
          return true;
        }
        int is_there; // Open MPI may have kept a message of an earlier operation back, until asked
        MPI_Iprobe(MPI_ANY_SOURCE, kTag, comm_, &is_there, MPI_STATUS_IGNORE);
        return false;
      };
      AwaitUntil(wait_for_, is_done, [&] { return InWorld(LeastAdvanced(memory)); });
    };
    auto note = [&](std::atomic<int64_t>& progress) {
      progress.fetch_add(1, std::memory_order_release);
    };
    SharedMemory::Progress& own = memory.ProgressOf(rank_);
    for (int64_t step = 0; step < pieces + 2 * kAhead; ++step) {
      if (int64_t number = step; number < pieces) {
        ForOthers([&](int rank) {
          until(memory.ProgressOf(rank).added, number - SharedMemory::kRows); // the place is free
          Piece piece = of(rank, number);
          std::memcpy(place(rank_, number, rank), piece.at, piece.items * item_bytes_);
        });
        note(own.handed_out);
      }
      if (int64_t number = step - kAhead; number >= 0 && number < pieces) {
        Piece piece = of(rank_, number);
        ForOthers([&](int rank) {
          until(memory.ProgressOf(rank).handed_out, number);
          MPI_Reduce_local(place(rank, number, rank_), piece.at, piece.items, type_, op_);
        });
        if (!AreFinite(piece.at, piece.items)) { // seen by those that see the piece as added
          own.not_finite.store(before + number + 1, std::memory_order_relaxed);
        }
        ForOthers([&](int rank) { until(memory.ProgressOf(rank).taken, number - SharedMemory::kRows); });
        std::memcpy(place(rank_, number, rank_), piece.at, piece.items * item_bytes_);
        note(own.added);
      }
      if (int64_t number = step - 2 * kAhead; number >= 0) {
        ForOthers([&](int rank) {
          until(memory.ProgressOf(rank).added, number);
          Piece piece = of(rank, number);
          std::memcpy(piece.at, place(rank, number, rank), piece.items * item_bytes_);
        });
        note(own.taken);
      }
    }
    is_finite_ = own.not_finite.load(std::memory_order_relaxed) <= before;
    ForOthers([&](int rank) {
      int64_t last = memory.ProgressOf(rank).not_finite.load(std::memory_order_relaxed);
      is_finite_ = is_finite_ && last <= before;
    });
    memory.pieces_before += pieces;
  }

  bool AreFinite(const char* at, int64_t items) const {
    return type_ == MPI_FLOAT    ? AreFinite<uint32_t, 0x7f800000, 1 << 23>(at, items)
           : type_ == MPI_DOUBLE ? AreFinite<uint64_t, 0x7ff0000000000000, 1LL << 52>(at, items)
                                 : false;
  }

  // Whether no float has the exponent of infinities and NaNs: one more would be a sign.
  template <typename Bits, Bits kInfinite, Bits kOne>
  static bool AreFinite(const char* at, int64_t items) {
    Bits found = 0;
    for (int64_t item = 0; item < items; ++item) {
      Bits bits;
      std::memcpy(&bits, at + item * sizeof(bits), sizeof(bits));
      found |= (bits & kInfinite) + kOne;
    }
    return found <= kInfinite;
  }

  // Call `use` with each other rank, from the next one on.
  template <typename Use> void ForOthers(Use use) {
    for (int step = 1; step < size_; ++step) {
      use((rank_ + step) % size_);
    }
  }

  struct Piece {
    char* at;
    int items;
  };

  // A piece of a block, empty after the last one.
  Piece PieceOf(int64_t count, int block, int64_t number, int64_t longest) const {
    int64_t each = count / size_, longer = count % size_;
    int64_t begin = block * each + std::min<int64_t>(block, longer) + number * longest;
    int64_t end = (block + 1) * each + std::min<int64_t>(block + 1, longer);
    int64_t items = std::max<int64_t>(0, std::min(longest, end - begin));
    return {values_ + std::min(begin, end) * item_bytes_, static_cast<int>(items)};
  }

  // Call `use` with address and number of items of each piece of a block.
  template <typename Use> void ForPieces(int64_t count, int block, int64_t longest, Use use) {
    block = (block + 2 * size_) % size_;
    for (int64_t number = 0;; ++number) {
      Piece piece = PieceOf(count, block, number, longest);
      if (piece.items == 0) {
        return;
      }
      use(piece.at, piece.items);
    }
  }

  template <typename Call> void Begin(Call call, char* at, int64_t items, int other) {
    messages_.emplace_back(MPI_REQUEST_NULL, other);
    call(at, static_cast<int>(items), type_, other, kTag, comm_, &messages_.back().first);
  }

  // Wait for all messages that have begun.
  void Await() {
    for (auto& [request, other] : messages_) {
      Await(request, other);
    }
    messages_.clear();
  }

  // After an error nothing is waited for any more.
  void Await(MPI_Request& request, int other) {
    auto is_done = [&] {
      int done = code_ != MPI_SUCCESS;
      if (!done) {
        code_ = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      }
      return done || code_ != MPI_SUCCESS;
    };
    AwaitUntil(wait_for_, is_done, [&] { return InWorld(other); });
  }

  // The rank for which all others wait: each wait is for what every rank does earlier in a sum.
  int LeastAdvanced(SharedMemory& memory) {
    int64_t least = INT64_MAX;
    int found = rank_;
    ForOthers([&](int rank) {
      auto& of = memory.ProgressOf(rank);
      if (int64_t done = of.handed_out + of.added + of.taken; done < least) {
        least = done;
        found = rank;
      }
    });
    return found;
  }

  // The number that a rank of this communicator has among all.
  int InWorld(int rank) const {
    MPI_Group own, world;
    MPI_Comm_group(comm_, &own);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    int found;
    MPI_Group_translate_ranks(own, 1, &rank, world, &found);
    MPI_Group_free(&own);
    MPI_Group_free(&world);
    return found;
  }

  char* Scratch(int64_t items) {
    static thread_local std::vector<char> kept;
    if (kept.size() < static_cast<size_t>(items * item_bytes_)) {
      kept.resize(items * item_bytes_);
    }
    return kept.data();
  }

  MPI_Comm comm_;
  WaitFor wait_for_;
  int rank_, size_, item_bytes_ = 0, code_ = MPI_SUCCESS;
  bool is_finite_ = false;
  char* values_ = nullptr;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  MPI_Op op_ = MPI_OP_NULL;
  std::vector<std::pair<MPI_Request, int>> messages_; // each with the other rank
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_SLEEPING_MPI_H

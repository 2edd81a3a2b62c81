// Sums over Gloo on hosts with several ranks. `launch/setup` adds this file to Horovod's source.
//
// On one host, ranks add in memory that they share, in the order of Gloo's ring.
//
// On several, they add first within each host, then over the hosts. With H hosts of L ranks, a ring
// over all N = H L ranks sends 2 (N - 1) / N of a message over the network link of each host, in
// 2 (N - 1) turns. Here it is 2 (H - 1) / H, in 2 (H - 1) turns: rank l of each host adds part l for
// its host, then adds it over the hosts with the other ranks l, and hands the total to its host. A
// message goes in pieces: one is on the network while the next is added within the host. The order
// of addition is fixed (hvdtrain/ring/orders.py): of each part, the terms of a host in the order of
// its ranks, then the sums of the hosts by Gloo's ring.
//
// Without shared memory Gloo adds on one host, and within several hosts its messages are used.

#ifndef HOROVOD_GLOO_SUMS_H
#define HOROVOD_GLOO_SUMS_H

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "controller.h"
#include "gloo/allreduce.h"
#include "gloo/broadcast.h"
#include "gloo/context.h"
#include "gloo/gloo_context.h"
#include "gloo/math.h"
#include "gloo/transport/unbound_buffer.h"
#include "gloo/types.h"
#include "shared_memory.h"
#include "waiting.h"

namespace horovod {
namespace common {

using GlooRanks = std::shared_ptr<gloo::Context>;

// Collective: return the memory that the ranks of a host share; null on all of them without. It is
// for one thread. (It stays until other ranks ask for theirs after these have gone.)
inline SharedMemory* MemoryOf(const GlooRanks& host) {
  using Known = std::map<std::weak_ptr<gloo::Context>, std::unique_ptr<SharedMemory>,
                         std::owner_less<std::weak_ptr<gloo::Context>>>;
  static Known& known = *new Known; // never destroyed, as a sum may be under way at the exit
  auto found = known.find(host);
  if (found == known.end()) {
    for (auto it = known.begin(); it != known.end();) {
      it = it->first.expired() ? known.erase(it) : std::next(it);
    }
    auto take_from_first = [&](void* values, int bytes) {
      gloo::BroadcastOptions options(host);
      options.setOutput(static_cast<char*>(values), bytes);
      options.setRoot(0);
      gloo::broadcast(options);
    };
    auto is_true_for_all = [&](bool is_true) {
      int all = is_true;
      gloo::AllreduceOptions options(host);
      options.setOutput(&all, 1);
      void (*least)(void*, const void*, const void*, size_t) = &gloo::min<int>;
      options.setReduceFunction(gloo::AllreduceOptions::Func(least));
      gloo::allreduce(options);
      return all == 1;
    };
    SharedMemory::Agreement agree{take_from_first, is_true_for_all};
    auto made = std::make_unique<SharedMemory>(host->rank, host->size, agree);
    found = known.emplace(host, std::move(made)).first;
  }
  return found->second->IsThere() ? found->second.get() : nullptr;
}

// A wait for other ranks of a host, which may end or stop meanwhile.
class WaitInMemory {
public:
  WaitInMemory(const SharedMemory& memory, std::chrono::milliseconds limit)
      : memory_(&memory), limit_us_(1000LL * limit.count()) {}

  template <typename IsDone> void operator()(IsDone is_done) const {
    long long next_us = kLookUs;
    AwaitUntil(WaitFor::kMessages, is_done, [&](long long waited_us) {
      if (waited_us < next_us) {
        return;
      }
      next_us = waited_us + kLookUs;
      int lost = memory_->Lost();
      if (lost >= 0 && !is_done()) { // it may have ended after its part
        throw std::runtime_error("local rank " + std::to_string(lost) +
                                 " of this host has left a sum in shared memory");
      }
      if (limit_us_ > 0 && waited_us > limit_us_) {
        throw std::runtime_error("timed out waiting " + std::to_string(limit_us_ / 1000) +
                                 " ms for the other ranks of this host, in shared memory");
      }
    });
  }

private:
  static constexpr long long kLookUs = 20000;
  const SharedMemory* memory_;
  long long limit_us_;
};

using GlooSumInMemory = SumInMemory<WaitInMemory>;

template <typename T> void AddTo(T* sum, const T* term, int64_t bytes) {
  gloo::sum<T>(sum, sum, term, bytes / sizeof(T));
}

// Collective: add `values` over the ranks of one host, as Gloo's ring does (gloo/allreduce.cc): the
// sum of block k begins at rank k - 1, goes to the left, and ends at rank k.
template <typename T>
void SumOnHost(SharedMemory& memory, const GlooRanks& host, T* values, int64_t count) {
  constexpr int64_t kLongestBytes = 1 << 20; // kMaxSegmentSize of gloo/allreduce.h
  const int64_t size = host->size, bytes = count * sizeof(T);
  auto divide_up = [](int64_t value, int64_t by) { return (value + by - 1) / by; };
  const int64_t each = divide_up(std::max(divide_up(bytes, kLongestBytes), 2 * size), size);
  const int64_t longest = each * divide_up(divide_up(bytes, each * size), sizeof(T));
  std::vector<GlooSumInMemory::Span> blocks;
  for (int64_t rank = 0; rank < size; ++rank) {
    int64_t begin = std::min(rank * longest, count), end = std::min(begin + longest, count);
    blocks.push_back({reinterpret_cast<char*>(values + begin), (end - begin) * int64_t(sizeof(T))});
  }
  GlooSumInMemory(memory, blocks, WaitInMemory(memory, host->getTimeout()))
      .Sum([&](GlooSumInMemory::Span own, auto terms) {
        auto from_right = [&](int64_t steps) {
          return reinterpret_cast<T*>(terms((host->rank + size - steps) % size));
        };
        T* sum = from_right(1);
        for (int64_t steps = 2; steps < size; ++steps) {
          T* next = from_right(steps);
          AddTo(next, sum, own.bytes);
          sum = next;
        }
        AddTo(reinterpret_cast<T*>(own.at), sum, own.bytes);
      });
}

template <typename T> class GlooByHost {
public:
  // `host`: the ranks of this host, and the memory that they share, or null. `hosts`: the ranks with
  // this one's number on each host.
  GlooByHost(const GlooRanks& host, SharedMemory* memory, const GlooRanks& hosts)
      : host_(host), hosts_(hosts), memory_(memory) {}

  // Collective: add `values` over all ranks, in place.
  void Sum(T* values, size_t count) {
    const size_t most = kPieceBytes / sizeof(T), pieces = (count + most - 1) / most;
    auto piece = [&](size_t number) {
      return Span{values + number * most, std::min(most, count - number * most)};
    };
    auto add = [&](GlooSumInMemory::Span own, auto terms) { AddInOrder(own, terms); };
    std::future<void> on_network;
    for (size_t number = 0; number <= pieces; ++number) {
      if (number < pieces) {
        memory_ ? InMemory(piece(number)).AddBlocks(add) : AddWithinHost(piece(number));
      }
      if (number > 0) {
        on_network.get();
      }
      if (number < pieces) {
        Span own = Part(piece(number), host_->rank);
        on_network = std::async(std::launch::async, [this, own] { AddOverHosts(own); });
      }
      if (number > 0) {
        Span before = piece(number - 1);
        memory_ ? InMemory(before).ShareBlocks() : ShareWithinHost(before);
      }
    }
  }

private:
  static constexpr size_t kPieceBytes = 4 << 20;
  static constexpr uint8_t kAddPrefix = 0x40, kSharePrefix = 0x41; // Gloo has 0x01 to 0x08

  struct Span {
    T* begin;
    size_t count;
    size_t bytes() const { return count * sizeof(T); }
  };

  // The part that a rank of the host adds: as even as possible, the first ones longer.
  Span Part(Span piece, size_t rank) const {
    size_t ranks = host_->size, each = piece.count / ranks, longer = piece.count % ranks;
    return {piece.begin + rank * each + std::min(rank, longer), each + (rank < longer)};
  }

  template <typename Use> void ForOthers(Use use) const {
    for (int rank = 0; rank < host_->size; ++rank) {
      if (rank != host_->rank) {
        use(rank);
      }
    }
  }

  GlooSumInMemory InMemory(Span piece) const {
    std::vector<GlooSumInMemory::Span> blocks;
    for (int rank = 0; rank < host_->size; ++rank) {
      Span part = Part(piece, rank);
      blocks.push_back({reinterpret_cast<char*>(part.begin), int64_t(part.bytes())});
    }
    return {*memory_, blocks, WaitInMemory(*memory_, host_->getTimeout())};
  }

  // Add a piece of this rank's part.
  template <typename Terms> void AddInOrder(GlooSumInMemory::Span own, Terms terms) const {
    auto term = [&](int rank) {
      return reinterpret_cast<T*>(rank == host_->rank ? own.at : terms(rank));
    };
    T* sum = term(0);
    for (int rank = 1; rank < host_->size; ++rank) {
      AddTo(sum, term(rank), own.bytes);
    }
    if (host_->rank != 0) {
      std::memcpy(own.at, sum, own.bytes);
    }
  }

  // Add this rank's part of all ranks of the host.
  void AddWithinHost(Span piece) {
    Span own = Part(piece, host_->rank);
    if (!terms_) { // no later piece is longer than the first
      terms_.reset(new T[own.count * host_->size]);
    }
    auto term = [&](int rank) { return terms_.get() + rank * own.count; };
    auto from = host_->createUnboundBuffer(piece.begin, piece.bytes());
    auto into = host_->createUnboundBuffer(terms_.get(), own.bytes() * host_->size);
    const uint64_t slot = gloo::Slot::build(kAddPrefix, 0);
    ForOthers([&](int rank) {
      into->recv(rank, slot, rank * own.bytes(), own.bytes());
      Span part = Part(piece, rank);
      from->send(rank, slot, (part.begin - piece.begin) * sizeof(T), part.bytes());
    });
    std::memcpy(term(host_->rank), own.begin, own.bytes());
    ForOthers([&](int) { into->waitRecv(); });
    for (int rank = 1; rank < host_->size; ++rank) {
      AddTo(term(0), term(rank), own.bytes());
    }
    std::memcpy(own.begin, term(0), own.bytes());
    ForOthers([&](int) { from->waitSend(); });
  }

  // Add this rank's part, the sum of its host, over the hosts.
  void AddOverHosts(Span own) {
    gloo::AllreduceOptions options(hosts_);
    options.setOutput<T>(own.begin, own.count);
    void (*add)(void*, const void*, const void*, size_t) = &gloo::sum<T>;
    options.setReduceFunction(gloo::AllreduceOptions::Func(add));
    gloo::allreduce(options);
  }

  // Hand this rank's part to the other ranks of the host, and take theirs.
  void ShareWithinHost(Span piece) {
    auto all = host_->createUnboundBuffer(piece.begin, piece.bytes());
    const uint64_t slot = gloo::Slot::build(kSharePrefix, 0);
    auto offset = [&](Span part) { return (part.begin - piece.begin) * sizeof(T); };
    Span own = Part(piece, host_->rank);
    ForOthers([&](int rank) {
      Span part = Part(piece, rank);
      all->recv(rank, slot, offset(part), part.bytes());
      all->send(rank, slot, offset(own), own.bytes());
    });
    ForOthers([&](int) { all->waitRecv(); });
    ForOthers([&](int) { all->waitSend(); });
  }

  GlooRanks host_, hosts_;
  SharedMemory* memory_;
  std::unique_ptr<T[]> terms_;
};

// How a sum is formed, the same on every rank.
enum class GlooSum { kByRing, kOnHost, kByHost };

inline GlooSum ChooseSum(Controller& controller, int64_t elements) {
  static const char* chosen = std::getenv("HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE");
  static const bool is_by_host = chosen && std::strcmp(chosen, "1") == 0;
  if (controller.GetLocalSize() == controller.GetSize()) {
    return GlooSum::kOnHost;
  }
  return is_by_host && controller.IsHomogeneous() && controller.GetLocalSize() > 1 &&
                 controller.GetCrossSize() > 1 && elements >= controller.GetSize()
             ? GlooSum::kByHost
             : GlooSum::kByRing;
}

// Collective: add `values` over all ranks, in place. Returns false if that is left to Gloo.
template <typename T>
bool SumOverGloo(GlooSum way, const GlooContext& ranks, T* values, int64_t count) {
  const GlooRanks& host = way == GlooSum::kOnHost ? ranks.ctx : ranks.local_ctx;
  if (way == GlooSum::kByRing || host->size < 2) {
    return false;
  }
  SharedMemory* memory = MemoryOf(host);
  if (way == GlooSum::kOnHost && !memory) {
    return false;
  }
  try {
    way == GlooSum::kOnHost ? SumOnHost<T>(*memory, host, values, count)
                            : GlooByHost<T>(host, memory, ranks.cross_ctx).Sum(values, count);
  } catch (...) {
    if (memory) { // let the others of this host know
      memory->ProgressOf(host->rank).has_failed = true;
    }
    throw;
  }
  return true;
}

} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_SUMS_H
